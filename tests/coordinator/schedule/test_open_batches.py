"""The batches of a job that are not done: each once, in order, without a list of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.schedule.open_batches import OpenBatches
from psrpc.core.batch import BatchId, cut_batch
from psrpc.core.errors import InvalidArgument
from psrpc.core.intervals import IntervalSet


def make(**changes: object) -> OpenBatches:
    settings = {"records": 10, "batch_size": 4, "epochs": 2, "done": {}, **changes}
    return OpenBatches(**settings)  # type: ignore[arg-type]


def taken(todo: OpenBatches) -> list[BatchId]:
    batches = []
    while (batch := todo.take()) is not None:
        batches.append(batch)
    return batches


def positions(batches: list[BatchId]) -> dict[int, IntervalSet]:
    sets: dict[int, IntervalSet] = {}
    for batch in batches:
        sets.setdefault(batch.epoch, IntervalSet()).add(batch.first, batch.first + batch.count)
    return sets


@given(
    st.integers(1, 30),
    st.integers(1, 7),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_new_batches_come_once_and_in_order(
    records: int, batch_size: int, epochs: int, chance: random.Random
) -> None:
    per_epoch = -(-records // batch_size)
    everything = [
        cut_batch(e, i, records, batch_size) for e in range(epochs) for i in range(per_epoch)
    ]
    state = {batch: chance.choice(["done", "partial", "new"]) for batch in everything}
    those = {
        what: [b for b in everything if state[b] == what] for what in ("done", "partial", "new")
    }
    todo = OpenBatches(
        records=records,
        batch_size=batch_size,
        epochs=epochs,
        done=positions(those["done"]),
        partial=positions(those["partial"]),
    )
    assert todo.batches == len(those["done"])
    for epoch in range(epochs):
        left = [b for b in everything if b.epoch == epoch and state[b] != "done"]
        assert todo.left(epoch) == len(left)
        assert (epoch in todo.finished_epochs) == (not left)
    assert taken(todo) == those["new"]
    partial = []
    while todo.has_partial:
        batch = todo.take_partial()
        assert batch is not None
        partial.append(batch)
    assert partial == those["partial"]
    assert todo.take_partial() is None
    last = [todo.finish(batch) for batch in those["partial"] + those["new"]]
    assert todo.finished
    assert sum(last) == sum(
        todo.left(e) == 0 and any(b.epoch == e for b in everything if state[b] != "done")
        for e in range(epochs)
    )


def test_batches_done_before_they_are_taken_are_skipped() -> None:
    todo = make(partial={1: IntervalSet([(0, 4)])})
    assert not todo.finish(BatchId(0, 4, 4))
    assert not todo.finish(BatchId(1, 0, 4))
    assert not todo.has_partial
    assert taken(todo) == [BatchId(0, 0, 4), BatchId(0, 8, 2), BatchId(1, 4, 4), BatchId(1, 8, 2)]


def test_nothing_new_of_a_later_epoch_is_taken() -> None:
    todo = make(until_epoch=1, partial={1: IntervalSet([(0, 4)])})
    batches = taken(todo)
    assert {batch.epoch for batch in batches} == {0}
    assert todo.next_epoch is None
    assert todo.take_partial() == BatchId(1, 0, 4)
    exhausted = []
    for batch in batches:
        exhausted.append(todo.exhausted)
        todo.finish(batch)
    assert (exhausted, todo.exhausted, todo.finished) == ([False] * 3, True, False)
    assert todo.epoch == 1


def test_a_large_epoch_that_is_nearly_done_is_stepped_over_at_once() -> None:
    records = 10**12
    todo = make(
        records=records, batch_size=10, epochs=1, done={0: IntervalSet([(0, records - 20)])}
    )
    assert [b.first for b in taken(todo)] == [records - 20, records - 10]
    assert todo.left(0) == 2


@pytest.mark.parametrize(
    "batch",
    [BatchId(2, 0, 4), BatchId(0, 1, 4), BatchId(0, 0, 3), BatchId(0, 8, 4), BatchId(0, 12, 4)],
)
def test_positions_off_the_grid_are_refused(batch: BatchId) -> None:
    with pytest.raises(InvalidArgument, match="is not a batch of this job"):
        make().check(batch)
