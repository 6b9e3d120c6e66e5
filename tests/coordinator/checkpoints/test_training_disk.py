"""The work of a run while its disk refuses: what waits, what is dropped, what is tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.checkpoints.snapshots import Failed, Taken
from coordinator.core.work import Report
from coordinator.transitions.stopping import SaveRequest
from psrpc.core.commands import Decision, Release, SnapshotOrder
from psrpc.core.errors import CheckpointError
from psrpc.core.shard_reports import ShardFile
from tests.coordinator.builders import QueuedDisk
from tests.coordinator.sync_job import SYNC, refuse
from tests.coordinator.training_run import training_run


def test_a_decision_that_cannot_be_stored_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training_run(tmp_path, **SYNC, checkpoint_every=1) as parts:
        training = parts.begin()
        with monkeypatch.context() as full:
            full.setattr(parts.store, "put_decision", refuse)
            attempts = parts.lease() + parts.lease_another()
            for worker, attempt in zip(("w", "another"), attempts, strict=True):
                training.commit(worker, 0, Report(attempt.batch, attempt.number), 0.0)
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


def test_facts_that_the_disk_refuses_are_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training_run(tmp_path, train_records=100) as parts:
        training = parts.begin()
        order = SnapshotOrder("step-00000001", 1, True, False, "checkpoints/.tmp-step-00000001")
        with monkeypatch.context() as full:
            full.setattr(parts.store, "put", refuse)
            full.setattr(parts.store, "put_checkpoint", refuse)
            training.notes.note_checkpoint(order, 1)
            while not training.epochs.over:
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


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_disk_that_is_full_at_the_end_does_not_take_the_trained_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    changes = SYNC if mode == "sync" else {"total_updates": 6}
    with training_run(tmp_path, **changes, eval_records=8, checkpoint_every=1000) as parts:
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
            while not training.epochs.over:
                parts.round() if mode == "sync" else parts.step()
                training.order_due()
            for now in (0.0, 10.0, 10.0):
                training.retry(now)
                training.order_due()
        assert refused == [name, f"{name}.r1"]
        assert training.failure is None
        assert "the final state cannot be saved" in parts.warnings.kept[0]
        request = SaveRequest()
        assert not request.saved(training, 10.0)
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
        assert request.saved(training, 30.0)
        assert training.orders.evaluations.snapshots == ("epoch-1", final.name)


def test_no_place_for_a_checkpoint_is_a_warning_and_its_evaluation_is_dropped(
    tmp_path: Path,
) -> None:
    with training_run(tmp_path, eval_records=8, checkpoint_every=3) as parts:
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
    with training_run(tmp_path, epochs=1) as parts:
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
