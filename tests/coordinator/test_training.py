"""The work of a run, put together, without a network and with a clock of our own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.curves import Curves
from coordinator.job_warnings import JobWarnings
from coordinator.run import Run
from coordinator.snapshots import Failed, ShardFile, Taken
from coordinator.store import Store
from coordinator.training import Training
from coordinator.work import (
    Attempt,
    Command,
    Decision,
    Release,
    Report,
    Round,
    SnapshotOrder,
    Train,
)
from psrpc.errors import CheckpointError, InvalidArgument
from psrpc.intervals import IntervalSet
from tests.coordinator.parts import QueuedDisk, make_run


class Bench:
    """A Training with what goes out of it."""

    def __init__(self, run: Run, store: Store) -> None:
        self.sent: list[Command] = []
        self.on_send: Callable[[Command], None] = self.sent.append
        self.run = run
        self.store = store
        self.warnings = JobWarnings()
        self.curves = Curves(run.run_dir / "tensorboard")
        self.training = Training(
            run, store, self.curves, lambda c: self.on_send(c), QueuedDisk(run), self.warnings
        )

    def begin(self, version: int = 0, generation: int = 1, **changes: Any) -> Training:
        run = replace(self.run, generation=generation, **changes)
        self.training.begin(run, [{}], [{}], version)
        return self.training

    def lease(self, worker: str = "w") -> list[Attempt]:
        work = self.training.lease(worker, 0.0, 10**9, 1)
        if isinstance(work, Round):
            return [work.attempt]
        return list(work.batches) if isinstance(work, Train) else []

    def lease_another(self) -> list[Attempt]:
        return self.lease("another")

    def round(self, loss: float = 1.0, skipped: bool = False) -> None:
        """One worker does a whole round."""
        rounds = self.training.rounds
        assert rounds is not None
        number = rounds.round
        while rounds.round == number:
            [attempt] = self.lease()
            report = Report(attempt.batch, attempt.number, loss, 0, skipped)
            self.training.commit("w", number, report, 0.0)

    def step(self, loss: float = 1.0, **fate: Any) -> None:
        """One worker does one lease (async)."""
        reports = [Report(a.batch, a.number, loss, **fate) for a in self.lease()]
        self.training.record("w", reports, 0.0)


@contextmanager
def bench(tmp_path: Path, **changes: Any) -> Iterator[Bench]:
    with Store(tmp_path / "ledger.sqlite") as store:
        bench = Bench(make_run(tmp_path, **changes), store)
        try:
            yield bench
        finally:
            bench.curves.close()


def refuse(*_: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


SYNC = {"mode": "sync", "replicas": 2, "epochs": 2, "train_records": 16, "total_updates": 4}


def test_a_decision_is_stored_before_anyone_sees_it(tmp_path: Path) -> None:
    with bench(tmp_path, **SYNC) as parts:
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


def test_a_decision_that_cannot_be_stored_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(tmp_path, **SYNC, checkpoint_every=1) as parts:
        training = parts.begin()
        with monkeypatch.context() as full:
            full.setattr(parts.store, "put_decision", refuse)
            attempts = parts.lease() + parts.lease_another()
            for attempt in attempts:
                training.commit("w", 0, Report(attempt.batch, attempt.number), 0.0)
            for _ in range(2):
                training.retry(0.0)
            assert parts.warnings.kept == [
                "round 0 waits: its decision cannot be stored: disk I/O error"
            ]
            assert training.failure is None
            assert training.schedule is not None
            assert training.schedule.waiting_for() == "the decision of round 0 to be stored"
            assert not training.idle
            assert parts.sent == []
            assert training.missed(0) == []
            assert training.span.step == 0
        training.retry(0.0)
        [decision] = parts.sent
        assert isinstance(decision, Decision)
        assert decision.attempts == tuple(attempts)
        assert [s.name for s in decision.snapshots] == ["step-00000001"]
        assert parts.store.last_decision(1) == decision
        assert (training.span.step, training.idle) == (1, True)
        training.retry(0.0)
        assert len(parts.sent) == 1


def test_what_the_disk_refuses_is_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(tmp_path, train_records=100) as parts:
        training = parts.begin()
        order = SnapshotOrder("step-00000001", 1, True, False, "checkpoints/.tmp-step-00000001")
        with monkeypatch.context() as full:
            full.setattr(parts.store, "put", refuse)
            full.setattr(parts.store, "put_checkpoint", refuse)
            training.notes.note_checkpoint(order, 1)
            while not training.trained:
                parts.step()
            training.retry(0.0)
        assert training.failure is None
        assert [w.partition(" cannot")[0] for w in parts.warnings.kept] == [
            "checkpoint step-00000001",
            "the first loss",
        ]
        assert parts.store.get("first_loss") is None
        training.retry(0.0)
        assert parts.store.get("first_loss") == 1.0
        assert parts.store.newest_checkpoint() == ("step-00000001", 1, 1)


def test_snapshots_of_a_sync_job_ride_in_the_decisions(tmp_path: Path) -> None:
    with bench(tmp_path, **SYNC, checkpoint_every=3, eval_records=8) as parts:
        training = parts.begin()
        for _ in range(4):
            parts.round()
        decisions = [c for c in parts.sent if isinstance(c, Decision)]
        assert [[(s.name, s.write, s.keep) for s in d.snapshots] for d in decisions] == [
            [],
            [("epoch-0", False, True)],
            [("step-00000003", True, False)],
            [("step-00000004", True, True)],
        ]
        assert (tmp_path / "checkpoints" / ".tmp-step-00000003").is_dir()
        assert training.trained
        training.order_due()
        assert len(parts.sent) == 4


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_disk_that_is_full_at_the_end_does_not_take_the_trained_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    changes = SYNC if mode == "sync" else {"total_updates": 6}
    with bench(tmp_path, **changes, eval_records=8, checkpoint_every=1000) as parts:
        training = parts.begin()
        refused: list[str] = []

        def full(order: SnapshotOrder) -> None:
            refused.append(order.name)
            raise CheckpointError("no space")

        def orders() -> list[SnapshotOrder]:
            return [o for o in parts.sent if isinstance(o, SnapshotOrder) and o.write]

        name = f"step-{training.run.description.total_updates:08d}"
        with monkeypatch.context() as disk:
            disk.setattr(QueuedDisk, "prepare", lambda _, order: full(order))
            while not training.trained:
                parts.round() if mode == "sync" else parts.step()
                training.order_due()
            for now in (0.0, 10.0, 10.0):
                training.retry(now)
                training.order_due()
        assert refused == [name, f"{name}.r1"]
        assert training.failure is None
        assert "the final state cannot be saved" in parts.warnings.kept[0]
        assert not training.is_saved(training.request_checkpoint())
        assert orders() == []
        training.retry(30.0)
        training.order_due()
        [final] = orders()
        assert (final.name, final.keep) == (f"{name}.r2", True)
        assert final in training.missed(0)
        step = training.span.step if mode == "sync" else 0
        taken = training.orders.snapshots.report(final.name, ShardFile(0, step), "")
        assert isinstance(taken, Taken)
        assert training.orders.checked(taken) is taken
        training.orders.taken(final)
        assert training.is_saved(0)
        assert training.orders.evaluations.snapshots == ("epoch-0", final.name)


def test_a_round_that_is_skipped_whole_only_raises_the_version(tmp_path: Path) -> None:
    with bench(tmp_path, **SYNC) as parts:
        training = parts.begin()
        parts.round(loss=float("nan"), skipped=True)
        assert (training.span.step, training.span.batches, training.span.examples) == (1, 2, 0)
        assert training.progress.skipped == 2
        assert "epoch 0 positions 0..3 was skipped" in parts.warnings.kept[0]


def test_commits_belong_to_sync_jobs(tmp_path: Path) -> None:
    with bench(tmp_path) as parts:
        training = parts.begin()
        [attempt] = parts.lease()
        with pytest.raises(InvalidArgument, match="this job is async"):
            training.commit("w", 0, Report(attempt.batch, attempt.number), 0.0)


def test_async_snapshots_are_ordered_by_command(tmp_path: Path) -> None:
    with bench(tmp_path, eval_records=8, checkpoint_every=2) as parts:
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
            ("epoch-0", False, True),
            ("step-00000004", True, False),
            ("step-00000006", True, True),
        ]


def test_finite_divergence_stops_the_job(tmp_path: Path) -> None:
    with bench(tmp_path, train_records=4000, epochs=1) as parts:
        training = parts.begin()
        for loss in [1.0] * 20 + [50.0] * 199:
            parts.step(loss)
        assert str(training.failure) == "None"
        for _ in range(5):
            parts.step(50.0)
        assert "diverged" in str(training.failure)
        assert parts.store.get("first_loss") == 1.0


def test_a_generation_takes_the_batches_that_all_shards_have(tmp_path: Path) -> None:
    with bench(tmp_path, shards=2) as parts:
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


def test_a_new_generation_starts_over_and_keeps_what_was_learnt(tmp_path: Path) -> None:
    with bench(tmp_path, **SYNC, checkpoint_every=1) as parts:
        training = parts.begin()
        for _ in range(3):
            parts.round(loss=2.0)
        assert [order.name for order in training.orders.snapshots.pending] == ["step-00000001"]
        training.halt()
        assert not list((tmp_path / "checkpoints").iterdir())
        training.begin(replace(parts.run, generation=2), [{}], [{}], version=1)
        assert training.span.step == 1
        assert training.loss == 2.0
        assert training.progress.batches == 6
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
        parts = Bench(make_run(tmp_path, generation=2), store)
        assert parts.begin(generation=3).notes.results == [("epoch-0", 3, {"loss": 0.5})]


def test_an_evaluation_that_a_loss_ended_is_done_again_on_a_new_state(tmp_path: Path) -> None:
    with bench(tmp_path, eval_records=8, epochs=5) as parts:
        training = parts.training
        training.notes.results = [("epoch-1", 6, {"loss": 1.0})]
        done = {epoch: IntervalSet([(0, 10)]) for epoch in range(4)}
        training.begin(replace(parts.run, generation=2), [done], [{}], version=0)
        assert parts.warnings.kept == ["epoch 0 is not evaluated: its state is gone"]
        training.order_due()
        orders = [o for o in parts.sent if isinstance(o, SnapshotOrder)]
        assert [(o.name, o.global_step, o.keep) for o in orders] == [
            ("epoch-2.g2", 12, True),
            ("epoch-3.g2", 12, True),
        ]


def test_a_snapshot_at_different_rounds_is_none(tmp_path: Path) -> None:
    with bench(tmp_path, **SYNC) as parts:
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
    with bench(tmp_path, **changes) as parts:
        training = parts.begin()
        parts.round() if mode == "sync" else parts.step()
        number = training.request_checkpoint()
        assert not training.is_saved(number)
        if mode == "sync":
            parts.round()
            order = parts.sent[-1].snapshots[0]  # type: ignore[union-attr]
        else:
            training.order_due()
            order = parts.sent[-1]
        assert isinstance(order, SnapshotOrder)
        assert not training.is_saved(number)
        training.orders.taken(order)
        assert training.is_saved(number)
        assert training.request_checkpoint() == number


def test_a_closed_sync_training_decides_nothing_and_saves_by_command(tmp_path: Path) -> None:
    with bench(tmp_path, **SYNC) as parts:
        training = parts.begin()
        parts.round()
        held = parts.lease() + parts.lease_another()
        number = training.close()
        for attempt in held:
            training.commit("w", 1, Report(attempt.batch, attempt.number), 0.0)
        training.order_due()
        order = parts.sent[-1]
        assert isinstance(order, SnapshotOrder)
        assert (order.name, order.global_step) == ("step-00000001", 1)
        training.orders.taken(order)
        assert training.is_saved(number)


def test_no_place_for_a_checkpoint_is_a_warning_and_its_evaluation_is_dropped(
    tmp_path: Path,
) -> None:
    with bench(tmp_path, eval_records=8, checkpoint_every=3) as parts:
        training = parts.begin()
        (tmp_path / "checkpoints").write_text("in the way")
        for _ in range(3):
            parts.step()
        training.order_due()
        assert training.failure is None
        assert "step-00000003 failed: PS504: cannot make" in parts.warnings.kept[0]
        assert parts.sent == [Release("step-00000003")]
        assert training.orders.evaluations.idle
        assert not training.orders.snapshots.writing


def test_a_final_snapshot_that_a_shard_could_not_write_is_ordered_again(tmp_path: Path) -> None:
    with bench(tmp_path, epochs=1) as parts:
        training = parts.begin()
        for _ in range(3):
            parts.step()
        training.order_due()
        [order] = parts.sent
        assert isinstance(order, SnapshotOrder)
        failed = training.orders.snapshots.report(order.name, ShardFile(0, 0), "no space left")
        assert isinstance(failed, Failed)
        training.orders.failed(failed)
        for now in (0.0, 10.0):
            training.order_due()
            assert parts.sent == [order]
            training.retry(now)
        training.order_due()
        assert training.failure is None
        again = parts.sent[-1]
        assert isinstance(again, SnapshotOrder)
        assert (again.name, again.global_step) == (f"{order.name}.r1", order.global_step)
        assert not (tmp_path / order.directory).exists()
        assert (tmp_path / again.directory).is_dir()
