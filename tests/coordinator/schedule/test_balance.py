"""Cuts of a round by speed: all records once, in no more cuts than there were batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.schedule.cuts import LARGEST, Uncut
from psrpc.core.batch import BatchId, cut_batch


def batches(records: int, batch_size: int, indices: set[int]) -> list[BatchId]:
    last = -(-records // batch_size)
    return [cut_batch(3, index, records, batch_size) for index in sorted(indices) if index < last]


def cut_all(uncut: Uncut, ratios: list[float | None]) -> list[BatchId]:
    cuts: list[BatchId] = []
    while uncut:
        cuts.append(uncut.cut(ratios[len(cuts) % len(ratios)]))
    return cuts


@given(
    st.integers(1, 200),
    st.integers(1, 40),
    st.sets(st.integers(0, 12), min_size=1, max_size=8),
    st.lists(st.none() | st.floats(0.01, 8.0), min_size=1, max_size=8),
)
def test_every_record_of_the_round_is_in_one_cut(
    records: int, batch_size: int, indices: set[int], ratios: list[float | None]
) -> None:
    wanted = batches(records, batch_size, indices)
    cuts = cut_all(Uncut(wanted, batch_size), ratios)
    assert len(cuts) <= len(wanted)
    assert [(c.epoch, p) for c in cuts for p in range(c.first, c.first + c.count)] == [
        (b.epoch, p) for b in wanted for p in range(b.first, b.first + b.count)
    ]


@given(
    st.integers(1, 8),
    st.lists(st.none() | st.floats(0.01, 8.0), min_size=1, max_size=8),
    st.integers(1, 64),
)
def test_without_gaps_no_cut_is_larger_than_a_worker_can_hold(
    replicas: int, ratios: list[float | None], batch_size: int
) -> None:
    uncut = Uncut(batches(10**6, batch_size, set(range(replicas))), batch_size)
    unit = max(1, batch_size // 8)
    assert all(c.count <= LARGEST * batch_size + unit * replicas for c in cut_all(uncut, ratios))


def test_an_unknown_speed_gets_an_ordinary_micro_batch() -> None:
    uncut = Uncut(batches(1000, 100, {0, 1, 2}), 100)
    assert [cut.count for cut in cut_all(uncut, [None])] == [100, 100, 100]


def test_sizes_are_as_the_speeds() -> None:
    # Four workers, one of them five times slower: the mean of the speeds is 0.8.
    speeds = [1.0, 1.0, 0.2, 1.0]
    uncut = Uncut(batches(10**4, 64, {0, 1, 2, 3}), 64)
    assert [cut.count for cut in cut_all(uncut, [v / 0.8 for v in speeds])] == [80, 80, 16, 80]


def test_sizes_are_multiples_of_an_eighth_of_a_batch() -> None:
    uncut = Uncut(batches(10**4, 64, set(range(12))), 64)
    cuts = cut_all(uncut, [1.1, 0.73, 1.37, 0.8])
    assert all(cut.count % 8 == 0 for cut in cuts)
    assert sum(cut.count for cut in cuts) == 12 * 64
