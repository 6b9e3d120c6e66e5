"""The work of a run, put together, without a network and with a clock of our own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.checkpoints import Checkpoints
from coordinator.curves import Curves
from coordinator.run import Restored, Run
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
from tests.coordinator.parts import make_run


class Bench:
    """A Training with what goes out of it."""

    def __init__(self, run: Run, store: Store) -> None:
        self.sent: list[Command] = []
        self.on_send: Callable[[Command], None] = self.sent.append
        self.store = store
        self.curves = Curves(run.run_dir / "tensorboard")
        self.training = Training(
            run, store, self.curves, lambda c: self.on_send(c), Checkpoints(run).prepare
        )

    def begin(self) -> Training:
        self.training.begin([{}], [{}])
        return self.training

    def lease(self, worker: str = "w") -> list[Attempt]:
        work = self.training.lease(worker, 0.0, 10**9, 1)
        if isinstance(work, Round):
            return [work.attempt]
        return list(work.batches) if isinstance(work, Train) else []

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


def test_a_decision_that_cannot_be_stored_does_not_go_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(tmp_path, **SYNC) as parts:
        training = parts.begin()

        def refuse(decision: Decision) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(parts.store, "put_decision", refuse)
        for _ in range(2):
            [attempt] = parts.lease()
            training.commit("w", 0, Report(attempt.batch, attempt.number), 0.0)
        assert training.failure == "the decision of round 0 cannot be stored: disk I/O error"
        assert parts.sent == []
        assert training.missed(0) == []
        assert training.span.step == 0


def test_a_ledger_that_cannot_be_written_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(tmp_path, train_records=100) as parts:
        parts.begin()

        def refuse(key: str, value: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(parts.store, "put", refuse)
        while parts.training.failure is None and not parts.training.trained:
            parts.step()
        assert parts.training.failure == "the first loss cannot be stored: disk I/O error"


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


def test_a_round_that_is_skipped_whole_only_raises_the_version(tmp_path: Path) -> None:
    with bench(tmp_path, **SYNC) as parts:
        training = parts.begin()
        parts.round(loss=float("nan"), skipped=True)
        assert (training.span.step, training.span.batches, training.span.examples) == (1, 2, 0)
        assert training.progress.skipped == 2
        assert "epoch 0 positions 0..3 was skipped" in training.warnings[0]


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
                training.snapshots.report(order.name, ShardFile(0, 0), "")
                training.snapshot_taken(Taken(order, ()))
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


def test_resume_takes_the_batches_that_all_shards_have(tmp_path: Path) -> None:
    changes = {"restored": Restored("step-00000004", 4), "generation": 2, "shards": 2}
    with bench(tmp_path, **changes) as parts:
        training = parts.training
        parts.store.put_evaluation("epoch-0", 1, 3, {"loss": 0.5})
        training.begin(
            [
                {0: IntervalSet([(0, 10)]), 1: IntervalSet([(0, 8)])},
                {0: IntervalSet([(0, 10)]), 1: IntervalSet([(4, 8)])},
            ],
            [{0: IntervalSet([(8, 10)])}, {0: IntervalSet([(8, 10)])}],
        )
        assert (training.span.batches, training.span.examples) == (4, 12)
        assert training.progress.skipped == 1
        [attempt] = parts.lease()
        assert (attempt.batch.epoch, attempt.batch.first) == (1, 0)
        assert attempt.number == (1 << 40) + 1


def test_results_of_the_run_before_are_remembered(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        store.put_evaluation("epoch-0", 1, 3, {"loss": 0.5})
        store.put_evaluation("epoch-1", 1, 9, {"loss": 0.4})
        run = make_run(tmp_path, restored=Restored("step-00000004", 4), generation=2)
        assert Bench(run, store).training.results == [("epoch-0", 3, {"loss": 0.5})]


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
        assert "step-00000003 failed: cannot make" in training.warnings[0]
        assert parts.sent == [Release("step-00000003")]
        assert training.evaluations.idle
        assert not training.snapshots.writing


def test_a_failed_final_snapshot_stops_the_job(tmp_path: Path) -> None:
    with bench(tmp_path, epochs=1) as parts:
        training = parts.begin()
        for _ in range(3):
            parts.step()
        training.order_due()
        [order] = parts.sent
        assert isinstance(order, SnapshotOrder)
        training.snapshot_failed(Failed(order, "shard 0: no space left"))
        assert training.failure is not None
        assert "no space left" in training.failure


def test_a_directory_left_by_a_killed_run_is_emptied(tmp_path: Path) -> None:
    checkpoints = Checkpoints(make_run(tmp_path))
    order = SnapshotOrder("s", 1, True, False, "checkpoints/.tmp-s")
    checkpoints.prepare(order)
    (tmp_path / order.directory / "old").touch()
    checkpoints.prepare(order)
    assert list((tmp_path / order.directory).iterdir()) == []
    with pytest.raises(CheckpointError, match="missing"):
        checkpoints.commit(Taken(order, (ShardFile(0, 1, "a", 3, "00"),)))
    checkpoints.discard(order)
    assert not (tmp_path / order.directory).exists()
