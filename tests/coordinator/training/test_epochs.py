"""Epochs of a run: their results, and the states that they are evaluated in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.core.work import EvaluationWork, MergeWork
from coordinator.schedule.evaluation import training_of
from psrpc.core.commands import SnapshotOrder
from psrpc.core.intervals import IntervalSet
from tests.coordinator.sync_job import SYNC
from tests.coordinator.training_run import training_run


def test_a_metric_that_does_not_add_up_has_no_training_value(tmp_path: Path) -> None:
    with training_run(tmp_path, eval_records=5000, unsummed_metrics=["most"]) as parts:
        training = parts.begin()
        for _ in range(3):
            parts.step()
        training.orders.evaluations.add_training(training_of(0), 3, (1.0, 1.0, 2.0))
        assert isinstance(training.orders.evaluations.lease("w"), MergeWork)
        training.epochs.merged("w", training_of(0), {"loss": 1.0, "most": 72.8})
        assert training.epochs.history.rows[0].training == {"loss": 1.0}
        training.order_due()
        training.orders.evaluations.snapshot_taken("epoch-1")
        task = training.orders.evaluations.lease("w")
        # One task, in which it is right.
        assert isinstance(task, EvaluationWork)
        assert (task.start, task.stop) == (0, 5000)
        [remark] = parts.run.description.remarks
        assert remark.startswith("the states of most do not add up over batches: ")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_epoch_is_evaluated_again_as_long_as_shards_hold_its_state(
    tmp_path: Path, mode: str
) -> None:
    settings = {**(SYNC if mode == "sync" else {}), "eval_records": 8, "epochs": 5}
    with training_run(tmp_path, **settings) as parts:
        training = parts.begin()
        records = parts.run.description.train_records
        done = {epoch: IntervalSet([(0, records)]) for epoch in range(4)}
        training.begin(replace(parts.run, generation=2), [done], [{}], version=8)
        assert parts.warnings.kept == [
            "3 epochs (the newest is 3) are not evaluated: its state is gone"
        ]
        training.order_due()
        orders = [o for o in parts.sent if isinstance(o, SnapshotOrder)]
        assert [(o.name, o.global_step, o.keep) for o in orders] == [
            ("epoch-4.g2", training.span.step, True)
        ]


@pytest.mark.parametrize("beyond", ["done", "partial"])
def test_no_epoch_is_evaluated_in_the_state_of_another(tmp_path: Path, beyond: str) -> None:
    with training_run(tmp_path, eval_records=8, epochs=5) as parts:
        training = parts.begin()
        done = {epoch: IntervalSet([(0, 10)]) for epoch in range(4)}
        more = {**done, 4: IntervalSet([(0, 4)])}
        shards = [more, more] if beyond == "done" else [done, more]
        training.begin(replace(parts.run, generation=2), shards, [{}, {}], version=0)
        assert parts.warnings.kept == [
            "4 epochs (the newest is 4) are not evaluated: its state is gone"
        ]
        training.order_due()
        assert not [o for o in parts.sent if isinstance(o, SnapshotOrder)]
