"""The history of a run: each epoch that is done, with each of its records once."""

from __future__ import annotations

import csv
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.core.work import MergeWork
from coordinator.process.summary import summarize
from coordinator.records.store import Store
from coordinator.training.training import Training
from psrpc.core.intervals import IntervalSet
from psrpc.core.shard_reports import EpochTotals
from psrpc.ops.clock import ManualClock
from tests.coordinator.builders import QueuedDisk, make_run
from tests.coordinator.training_run import TrainingRun
from tests.coordinator.whole_coordinator import Coordinator

RECORDS = 8
WHOLE = IntervalSet([(0, RECORDS)])
SGD = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
SHARDS = {"class_name": "SGD", "config": {"learning_rate": 1.0}}


class NoCurves:
    def epoch(self, values: Any, step: int) -> None:
        self.seen = dict(values), step


def make_training_run(tmp_path: Path, store: Store, **changes: Any) -> TrainingRun:
    """With a file for its history."""
    values: dict[str, Any] = {"train_records": RECORDS, "epochs": 3, "optimizer": SGD} | changes
    made = TrainingRun(make_run(tmp_path, **values), store)
    made.training = Training(
        made.run,
        store,
        cast("Any", NoCurves()),
        lambda c: made.sent.append(c),
        QueuedDisk(made.run),
        made.warnings,
        made.clock,
        tmp_path / "history.csv",
    )
    return made


def rows(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "history.csv").open() as file:
        return list(csv.DictReader(file))


def begin(made: TrainingRun, generation: int, *epochs: int) -> Training:
    run = replace(made.run, generation=generation)
    made.training.begin(run, [dict.fromkeys(epochs, WHOLE)], [{}], 0)
    return made.training


def test_an_epoch_is_a_row_once_all_of_its_records_are_counted(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        training = begin(make_training_run(tmp_path, store), 1, 0)
        training.epochs.take_totals(
            [EpochTotals(0, RECORDS - 1, (6.0, 7.0)), EpochTotals(1, 4, (1, 4))]
        )
        training.epochs.history.write()
        assert rows(tmp_path) == [{"epoch": "1", "step": "2", "learning_rate": "0.5"}]
        training.epochs.take_totals([EpochTotals(0, RECORDS, (6.0, 8.0))])
        training.epochs.take_totals([EpochTotals(0, RECORDS, (99.0, 8.0))])
        training.epochs.history.write()
        [row] = rows(tmp_path)
        assert row == {"epoch": "1", "step": "2", "loss": "0.75", "learning_rate": "0.5"}


def test_metrics_are_merged_by_a_worker_once(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        training = begin(make_training_run(tmp_path, store), 1, 0)
        evaluations = training.orders.evaluations
        for _ in range(2):
            training.epochs.take_totals([EpochTotals(0, RECORDS, (6.0, 8.0, 4.0, 8.0))])
        work = evaluations.lease("worker-0")
        assert isinstance(work, MergeWork)
        assert work.training
        assert [state.values for state in work.states] == [(6.0, 8.0), (4.0, 8.0)]
        assert evaluations.lease("worker-1") is None
        training.epochs.merged("worker-1", work.evaluation, {"loss": 9.0, "accuracy": 0.0})
        assert evaluations.lease("worker-0") == work, "it is still to be done"
        training.epochs.merged("worker-0", work.evaluation, {"loss": 0.75, "accuracy": 0.5})
        assert evaluations.idle
        [row] = training.epochs.history.rows
        assert row.training == {"loss": 0.75, "accuracy": 0.5}
        assert training.notes.results == []


def test_evaluations_stand_beside_it_and_the_final_one_is_the_last_epochs(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        training = begin(make_training_run(tmp_path, store, eval_records=2), 1, 0, 1, 2)
        for name, snapshot, value in (("epoch-1", "a", 0.25), ("final", "b", 0.125)):
            training.orders.evaluations.drop("step-00000006")
            evaluations = training.orders.evaluations
            evaluations._queue.clear()
            evaluations.add(name, snapshot, 2)
            evaluations.snapshot_taken(snapshot)
            evaluations.lease("w")
            evaluations.report("w", name, 0, 2, ())
            evaluations.lease("w")
            training.epochs.merged("w", name, {"loss": value, "accuracy": 1 - value})
        training.epochs.take_totals([EpochTotals(1, RECORDS, (8.0, 8.0))])
        training.epochs.history.write()
        found = [(r["epoch"], r["loss"], r["val_loss"], r["val_accuracy"]) for r in rows(tmp_path)]
        assert found == [
            ("1", "", "0.25", "0.75"),
            ("2", "1.0", "", ""),
            ("3", "", "0.125", "0.875"),
        ]
        head = (tmp_path / "history.csv").read_text().splitlines()[0]
        assert head == "epoch,step,loss,val_loss,val_accuracy,eval_step,learning_rate"


def test_the_step_of_the_state_that_was_evaluated_is_told_and_stored(tmp_path: Path) -> None:
    """Workers that wait for none are further than the epoch's end by the time of a snapshot."""
    with Store(tmp_path / "ledger.sqlite") as store:
        training = begin(make_training_run(tmp_path, store, eval_records=2), 1, 0, 1)
        evaluations = training.orders.evaluations
        evaluations._queue.clear()
        evaluations.add("epoch-1", "a", 5)
        evaluations.snapshot_taken("a")
        evaluations.lease("w")
        evaluations.report("w", "epoch-1", 0, 2, ())
        evaluations.lease("w")
        training.epochs.merged("w", "epoch-1", {"loss": 0.5})
        training.epochs.history.write()
        assert [(r["step"], r["eval_step"]) for r in rows(tmp_path)] == [("2", "5"), ("4", "")]
        assert training.epochs.history.rows[0].flat()["eval_step"] == 5
        assert [row["eval_step"] for row in store.epochs()] == [5, None]


def test_a_coordinator_that_was_restarted_goes_on_with_its_history(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        training = begin(make_training_run(tmp_path, store), 1, 0)
        training.epochs.take_totals([EpochTotals(0, RECORDS, (6.0, 8.0))])
    with Store(tmp_path / "ledger.sqlite") as store:
        training = begin(make_training_run(tmp_path, store), 2, 0, 1)
        training.epochs.take_totals([EpochTotals(1, RECORDS, (2.0, 8.0))])
        assert [row.training for row in training.epochs.history.rows] == [
            {"loss": 0.75},
            {"loss": 0.25},
        ]


def test_epochs_that_are_done_again_are_written_over(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        made = make_training_run(tmp_path, store)
        training = begin(made, 1, 0, 1)
        totals = [EpochTotals(0, RECORDS, (6.0, 8.0)), EpochTotals(1, RECORDS, (2.0, 8.0))]
        training.epochs.take_totals(totals)
        # A checkpoint of the first epoch is restored.
        begin(made, 2, 0)
        assert [row.epoch for row in training.epochs.history.rows] == [0]
    with Store(tmp_path / "ledger.sqlite") as store:
        training = begin(make_training_run(tmp_path, store), 3, 0, 1)
        training.epochs.history.write()
        assert [row["loss"] for row in rows(tmp_path)] == ["0.75", ""]
        training.epochs.take_totals([EpochTotals(1, RECORDS, (4.0, 8.0))])
        training.epochs.history.write()
        assert [row["loss"] for row in rows(tmp_path)] == ["0.75", "0.5"]


def test_a_disk_that_refuses_delays_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        made = make_training_run(tmp_path, store)
        training = begin(made, 1, 0)

        def refuse(*_: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        with monkeypatch.context() as patch:
            patch.setattr(store, "put_epoch", refuse)
            training.epochs.take_totals([EpochTotals(0, RECORDS, (6.0, 8.0))])
        assert "history of epoch 1 cannot be stored" in made.warnings.kept[0]
        training.notes.retry()
        assert [row["training"] for row in store.epochs()] == [{"loss": 0.75}]

        (tmp_path / "history.csv").mkdir()
        training.epochs.history.write()
        assert "history.csv cannot be written" in made.warnings.kept[-1]
        (tmp_path / "history.csv").rmdir()
        training.epochs.history.write()
        assert [row["loss"] for row in rows(tmp_path)] == ["0.75"]


def test_totals_that_the_disk_refused_are_not_stored_once_their_epoch_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that starts then would take it for what the epoch comes to when done again."""
    with Store(tmp_path / "ledger.sqlite") as store:
        made = make_training_run(tmp_path, store)
        training = begin(made, 1, 0)

        def refuse(*_: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        with monkeypatch.context() as patch:
            patch.setattr(store, "put_epoch", refuse)
            training.epochs.take_totals([EpochTotals(0, RECORDS, (6.0, 8.0))])
        assert made.warnings.kept
        begin(made, 2)
        training.notes.retry()
        assert store.epochs() == []


def test_it_is_in_the_curves(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        made = make_training_run(tmp_path, store)
        training = begin(made, 1, 0)
        training.epochs.take_totals([EpochTotals(0, RECORDS, (6.0, 8.0))])
        assert training.epochs._curves.seen == ({"train_loss": 0.75}, 2)  # type: ignore[attr-defined]


def test_the_learning_rate_is_left_out_where_a_schedule_says_it(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        schedule = {"config": {"learning_rate": {"class_name": "CosineDecay"}}}
        training = begin(make_training_run(tmp_path, store, optimizer=schedule), 1, 0)
        assert [row.learning_rate for row in training.epochs.history.rows] == [None]


@pytest.mark.parametrize("rate", [0.25, None])
def test_with_local_steps_the_learning_rate_is_the_workers(
    tmp_path: Path, rate: float | None
) -> None:
    """Shards subtract what they are given, at a rate of 1."""
    with Store(tmp_path / "ledger.sqlite") as store:
        made = make_training_run(
            tmp_path, store, optimizer=SHARDS, local_steps=2, local_learning_rate=rate
        )
        training = begin(made, 1, 0)
        assert [row.learning_rate for row in training.epochs.history.rows] == [rate]


def test_a_summary_has_every_epoch(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    job_run = coordinator.job_run
    job_run.training.epochs.history.begin([0], job_run.run)
    job_run.training.epochs.history.trained(0, {"loss": float("nan")})
    summary = json.loads(json.dumps(summarize(job_run), allow_nan=False))
    assert [(row["epoch"], row["loss"]) for row in summary["history"]] == [(1, None)]
    coordinator.store.close()


def test_time_between_two_writes_grows_with_the_file(tmp_path: Path) -> None:
    clock = ManualClock()
    with Store(tmp_path / "ledger.sqlite") as store:
        training = begin(make_training_run(tmp_path, store, epochs=5000), 1, *range(4000))
        training.epochs.history.write(clock.now())
        training.epochs.take_totals([EpochTotals(3999, RECORDS, (6.0, 8.0))])
        training.epochs.history.write(clock.now() + 1.9)
        assert rows(tmp_path)[-1]["step"] == "8000"
        assert "loss" not in rows(tmp_path)[-1]
        training.epochs.history.write(clock.now() + 2.0)
        assert rows(tmp_path)[-1]["loss"] == "0.75"
