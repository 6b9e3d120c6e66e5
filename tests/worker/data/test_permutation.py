"""Seeded orders: the same everywhere, every record once."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from psrpc.core.batch import BatchId
from worker.data.function import Function
from worker.data.permutation import BlockOrder, RecordOrder, permutation, seed_state


def test_the_order_is_pinned() -> None:
    # Load-bearing: a job resumed by another version goes on in this order.
    assert permutation(10, 0, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


def test_orders_differ_by_seed_and_epoch_and_are_shuffled() -> None:
    orders = [permutation(1000, *key) for key in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for i, order in enumerate(orders):
        assert sorted(order) == list(range(1000))
        assert (order == np.arange(1000)).sum() < 10
        assert all((order == other).sum() < 10 for other in orders[:i])


def test_every_place_is_as_likely_as_any_other() -> None:
    places = np.array([permutation(5, seed) for seed in range(4000)])
    for record in range(5):
        counts = np.bincount(np.argwhere(places == record)[:, 1], minlength=5)
        # 800 each, standard deviation 25.
        assert abs(counts - 800).max() < 130


def test_only_the_last_epochs_are_kept() -> None:
    order = RecordOrder(50)
    first = order.records_at(0, 0, 0, 50).copy()
    for epoch in range(5):
        order.records_at(0, epoch, 10, 20)
    assert len(order._epochs) == 2
    assert (order.records_at(0, 0, 5, 9) == first[5:9]).all()


@settings(max_examples=60)
@given(records=st.integers(1, 60), block=st.integers(1, 25), batch=st.integers(1, 30))
def test_blocks_give_every_record_once_in_any_batches(records: int, block: int, batch: int) -> None:
    order = BlockOrder(records, block)
    seen: list[int] = []
    for first in range(0, records, batch):
        stop = min(first + batch, records)
        before = len(seen)
        for number, low, high in order.pieces(7, 1, first, stop):
            assert low < high
            start, _ = order.range_of(number)
            seen += (start + order.shuffled(7, 1, number)[low:high]).tolist()
        assert len(seen) - before == stop - first
    assert sorted(seen) == list(range(records))
    # Positions have the same records in other batches.
    pieces = order.pieces(7, 1, records // 2, records)
    tail = [
        int(order.range_of(number)[0] + place)
        for number, low, high in pieces
        for place in order.shuffled(7, 1, number)[low:high]
    ]
    assert tail == seen[records // 2 :]


def test_blocks_and_records_within_them_are_in_another_order_each_epoch() -> None:
    order = BlockOrder(1000, 100)
    blocks = [[n for n, _, _ in order.pieces(0, epoch, 0, 1000)] for epoch in range(2)]
    assert blocks[0] != blocks[1]
    assert sorted(blocks[0]) == list(range(10))
    assert (order.shuffled(0, 0, 3) != order.shuffled(0, 1, 3)).any()
    assert (order.shuffled(0, 0, 3) != order.shuffled(0, 0, 4)).any()


def test_random_state_belongs_to_the_batch() -> None:
    state = seed_state(5, BatchId(1, 20, 10), 0)
    assert state.dtype == np.uint32
    assert state.shape == (2,)
    # Load-bearing: a repeated batch must draw the same mask, in later versions too.
    assert state.tolist() == [3964338610, 403769543]
    others = [
        seed_state(5, BatchId(1, 20, 10), 1),
        seed_state(6, BatchId(1, 20, 10), 0),
        seed_state(5, BatchId(2, 20, 10), 0),
        seed_state(5, BatchId(1, 30, 10), 0),
        seed_state(5, BatchId(1, 20, 9), 0),
    ]
    assert len({tuple(s) for s in [state, *others]}) == 6


def test_earlier_reads_do_not_change_a_batch() -> None:
    """Workers read other batches, and both epochs of a seam at once."""

    def make(start: int, stop: int) -> Any:
        return np.arange(start, stop), np.arange(start, stop)

    data = Function(make, 20, block_records=10)
    batches = [(seed, BatchId(epoch, 0, 20)) for seed in (0, 1) for epoch in (0, 1)]
    for seed, batch in (*batches, *reversed(batches)):
        fresh = Function(make, 20, block_records=10)
        assert data.read(seed, batch)[1].tolist() == fresh.read(seed, batch)[1].tolist()
