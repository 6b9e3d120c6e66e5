"""The work of a run, put together, without a network and with a clock of our own."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.checkpoints.snapshots import Failed, Taken
from coordinator.core.work import Report
from coordinator.records.store import Store
from psrpc.core.commands import Command, Decision, SnapshotOrder
from psrpc.core.errors import InvalidArgument
from psrpc.core.intervals import IntervalSet
from psrpc.core.shard_reports import ShardFile
from tests.coordinator.builders import make_run
from tests.coordinator.sync_job import SYNC
from tests.coordinator.training_run import TrainingRun, training_run


def test_a_decision_is_stored_before_anyone_sees_it(tmp_path: Path) -> None:
    with training_run(tmp_path, **SYNC) as parts:
        training = parts.begin()
        seen_in_store = []

        def look(command: Command) -> None:
            other = sqlite3.connect(tmp_path / "ledger.sqlite")
            seen_in_store.append(other.execute("SELECT round FROM decisions").fetchall())
            other.close()
            parts.sent.append(command)

        parts.on_send = look
        parts.round()
        assert seen_in_store == [[(0,)]]
        assert parts.sent == [parts.store.last_decision(1)]
        assert training.missed(0) == parts.sent


def test_snapshots_of_a_sync_job_ride_in_the_decisions(tmp_path: Path) -> None:
    with training_run(tmp_path, **SYNC, checkpoint_every=3, eval_records=8) as parts:
        training = parts.begin()
        for _ in range(4):
            parts.round()
        decisions = [c for c in parts.sent if isinstance(c, Decision)]
        assert [[(s.name, s.write, s.keep) for s in d.snapshots] for d in decisions] == [
            [],
            [("epoch-1", False, True)],
            [("step-00000003", True, False)],
            [("step-00000004", True, True)],
        ]
        assert (tmp_path / "checkpoints" / ".tmp-step-00000003").is_dir()
        assert training.epochs.over
        training.order_due()
        assert len(parts.sent) == 4


def test_a_round_that_is_skipped_whole_only_raises_the_version(tmp_path: Path) -> None:
    with training_run(tmp_path, **SYNC) as parts:
        training = parts.begin()
        parts.round(loss=float("nan"), skipped=True)
        assert (training.span.step, training.span.batches, training.span.examples) == (1, 2, 0)
        assert training.progress.skipped == 2
        assert "epoch 1 positions 0..3 were skipped" in parts.warnings.kept[0]


def test_commits_belong_to_sync_jobs(tmp_path: Path) -> None:
    with training_run(tmp_path) as parts:
        training = parts.begin()
        [attempt] = parts.lease()
        with pytest.raises(InvalidArgument, match="this job is async"):
            training.commit("w", 0, Report(attempt.batch, attempt.number), 0.0)


def test_async_snapshots_are_ordered_by_command(tmp_path: Path) -> None:
    with training_run(tmp_path, eval_records=8, checkpoint_every=2) as parts:
        training = parts.begin()
        orders = []
        for _ in range(6):
            parts.step()
            training.order_due()
            while parts.sent:
                order = parts.sent.pop()
                assert isinstance(order, SnapshotOrder)
                orders.append((order.name, order.write, order.keep))
                training.orders.snapshots.report(order.name, ShardFile(0, 0), "")
                training.orders.taken(order)
        assert orders == [
            ("step-00000002", True, False),
            ("epoch-1", False, True),
            ("step-00000004", True, False),
            ("step-00000006", True, True),
        ]


def test_a_generation_takes_the_batches_that_all_shards_have(tmp_path: Path) -> None:
    with training_run(tmp_path, shards=2) as parts:
        training = parts.training
        training.begin(
            replace(parts.run, generation=2),
            [
                {0: IntervalSet([(0, 10)]), 1: IntervalSet([(0, 8)])},
                {0: IntervalSet([(0, 10)]), 1: IntervalSet([(4, 8)])},
            ],
            [{0: IntervalSet([(8, 10)])}, {0: IntervalSet([(8, 10)])}],
            version=0,
        )
        assert (training.span.batches, training.span.examples) == (4, 12)
        assert training.progress.skipped == 1
        [attempt] = parts.lease()
        assert (attempt.batch.epoch, attempt.batch.first) == (1, 0)
        assert attempt.number == (1 << 40) + 1


def test_steps_per_second_are_rounds_in_sync_mode(tmp_path: Path) -> None:
    with training_run(tmp_path, **SYNC) as parts:
        training = parts.begin()
        for second in range(3):
            for _ in range(2):
                [attempt] = parts.lease()
                report = Report(attempt.batch, attempt.number, 1.0)
                training.commit("w", second, report, float(second))
        assert (training.span.step, training.span.batches) == (3, 6)
        progress = training.progress
        assert (progress.steps.rate(4.0), progress.batch_rate.rate(4.0)) == (3 / 4, 6 / 4)
        assert progress.workers["w"].batch_rate.rate(4.0) == 6 / 4


def test_a_new_generation_starts_over_and_keeps_what_was_learnt(tmp_path: Path) -> None:
    with training_run(tmp_path, **SYNC, checkpoint_every=1) as parts:
        training = parts.begin()
        for _ in range(3):
            parts.round(loss=2.0)
        assert [order.name for order in training.orders.snapshots.pending] == ["step-00000001"]
        training.halt()
        assert not list((tmp_path / "checkpoints").iterdir())
        training.begin(replace(parts.run, generation=2), [{}], [{}], version=1)
        assert training.span.step == 1
        assert training.watch.loss == 2.0
        assert training.progress.batches == 6
        assert training.progress.steps_done == 3
        assert training.missed(0) == []
        [attempt] = parts.lease()
        assert attempt.number == (1 << 40) + 1
        parts.round()
        parts.round()
        decision = parts.sent[-1]
        assert isinstance(decision, Decision)
        assert (decision.generation, decision.round) == (2, 2)
        assert parts.store.last_decision(1) == decision


def test_results_of_generations_before_are_remembered(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        store.put_evaluation("epoch-0", 1, 3, {"loss": 0.5})
        parts = TrainingRun(make_run(tmp_path, generation=2), store)
        assert parts.begin(generation=3).notes.results == [("epoch-0", 3, {"loss": 0.5})]


def test_a_trained_state_is_the_last_epochs_alone(tmp_path: Path) -> None:
    with training_run(tmp_path, eval_records=8, epochs=3) as parts:
        training = parts.begin()
        done = {epoch: IntervalSet([(0, 10)]) for epoch in range(3)}
        training.begin(replace(parts.run, generation=2), [done], [{}], version=0)
        training.order_due()
        orders = [o for o in parts.sent if isinstance(o, SnapshotOrder)]
        # It is the final one, which no epoch before gets.
        assert [(o.name, o.keep) for o in orders] == [("step-00000009.g2", True)]
        assert len(training.orders.evaluations.snapshots) == 1


def test_a_snapshot_at_different_rounds_is_none(tmp_path: Path) -> None:
    with training_run(tmp_path, **SYNC) as parts:
        training = parts.begin()
        order = SnapshotOrder("step-00000002", 2, True, False, "checkpoints/.tmp-step-00000002")
        good = Taken(order, (ShardFile(0, 2), ShardFile(1, 2)))
        assert training.orders.checked(good) is good
        torn = training.orders.checked(Taken(order, (ShardFile(0, 2), ShardFile(1, 3))))
        assert isinstance(torn, Failed)
        assert "at rounds [2, 3]" in torn.reason


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_checkpoint_that_was_asked_for_is_known_by_its_number(tmp_path: Path, mode: str) -> None:
    changes = SYNC if mode == "sync" else {"train_records": 100}
    with training_run(tmp_path, **changes) as parts:
        training = parts.begin()
        parts.round() if mode == "sync" else parts.step()
        number = training.orders.request(training.span.step)
        assert not training.orders.is_saved(number)
        if mode == "sync":
            parts.round()
            order = parts.sent[-1].snapshots[0]  # type: ignore[union-attr]
        else:
            training.order_due()
            order = parts.sent[-1]
        assert isinstance(order, SnapshotOrder)
        assert not training.orders.is_saved(number)
        training.orders.taken(order)
        assert training.orders.is_saved(number)
        assert training.orders.request(training.span.step) == number


def test_a_closed_sync_training_decides_nothing_and_saves_by_command(tmp_path: Path) -> None:
    with training_run(tmp_path, **SYNC) as parts:
        training = parts.begin()
        parts.round()
        held = parts.lease() + parts.lease_another()
        training.close()
        number = training.orders.request(training.span.step)
        for attempt in held:
            training.commit("w", 1, Report(attempt.batch, attempt.number), 0.0)
        training.order_due()
        order = parts.sent[-1]
        assert isinstance(order, SnapshotOrder)
        assert (order.name, order.global_step) == ("step-00000001", 1)
        training.orders.taken(order)
        assert training.orders.is_saved(number)
