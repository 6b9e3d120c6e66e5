"""The applied-set: every batch is in it once, or is refused."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.core.applied import AppliedSet
from psrpc.core.batch import BatchId, cut_batch
from psrpc.core.errors import InvalidArgument


@settings(derandomize=True)
@given(st.lists(st.integers(0, 39), max_size=50), st.integers(2, 7))
def test_it_holds_what_was_added_and_nothing_else(indices: list[int], size: int) -> None:
    applied = AppliedSet()
    done: set[int] = set()
    batches = [cut_batch(0, i, 40 * size - 1, size) for i in range(40)]
    for index in indices:
        assert applied.contains(batches[index]) == (index in done)
        if index not in done:
            applied.add(batches[index], skipped=index % 3 == 0)
            done.add(index)
    assert [applied.contains(b) for b in batches] == [i in done for i in range(40)]
    assert AppliedSet.from_epochs(json.loads(json.dumps(applied.to_epochs()))) == applied


def test_an_epoch_in_any_order_becomes_one_interval() -> None:
    applied = AppliedSet()
    for index in (3, 0, 2, 1):
        applied.add(BatchId(2, index * 10, 10), skipped=index == 2)
    applied.add(BatchId(1, 0, 10))
    assert applied.to_epochs() == [
        {"epoch": 1, "applied": [[0, 10]], "skipped": []},
        {"epoch": 2, "applied": [[0, 40]], "skipped": [[20, 30]]},
    ]


@pytest.mark.slow
def test_an_epoch_of_many_batches_is_small_once_it_is_done() -> None:
    """Even when its batches were leased in the worst of all orders: no two neighbours in the first
    half of them. Then it is a set of 100,000 intervals for a moment."""
    batches, size = 200_000, 250
    applied, repeated = AppliedSet(), 0
    for index in (*range(0, batches, 2), *range(batches - 1, 0, -2)):
        batch = BatchId(0, index * size, size)
        repeated += applied.contains(batch)
        applied.add(batch)
        if index == batches - 2:
            worst = applied.to_epochs()
    assert repeated == 0
    assert len(worst[0]["applied"]) == batches // 2
    assert len(json.dumps(worst)) < (12 << 20) // 5
    assert len(json.dumps(applied.to_epochs())) < 100


def test_at_random_an_epoch_has_a_gap_for_every_fourth_batch_at_the_worst_moment() -> None:
    batches, size = 10_000, 50
    order = list(range(batches))
    random.Random(1).shuffle(order)
    applied, most = AppliedSet(), 0
    for done, index in enumerate(order):
        applied.add(BatchId(0, index * size, size))
        if done % (batches // 20) == 0:
            most = max(most, len(applied.to_epochs()[0]["applied"]))
    assert 0.22 * batches < most < 0.28 * batches
    assert applied.to_epochs() == [{"epoch": 0, "applied": [[0, batches * size]], "skipped": []}]


@pytest.mark.parametrize(("first", "count"), [(5, 10), (0, 25), (15, 2), (19, 10), (9, 2)])
def test_a_batch_that_is_there_in_part_is_refused(first: int, count: int) -> None:
    applied = AppliedSet()
    applied.add(BatchId(0, 0, 7))
    applied.add(BatchId(0, 10, 6))
    applied.add(BatchId(0, 20, 10))
    with pytest.raises(InvalidArgument, match="applied in part"):
        applied.contains(BatchId(0, first, count))
    assert not applied.contains(BatchId(1, first, count)), "another epoch"


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"epoch": "1", "applied": [], "skipped": []},
        {"epoch": 1, "applied": [[3, 3]], "skipped": []},
        {"epoch": 1, "applied": 7, "skipped": []},
        {"epoch": 1, "applied": [[0, 1, 2]], "skipped": []},
    ],
)
def test_malformed_applied_sets_are_refused(entry: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="is not an epoch with intervals"):
        AppliedSet.from_epochs([entry])
