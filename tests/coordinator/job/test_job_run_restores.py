"""Where a generation of a whole coordinator begins: what shards keep, restore or initialize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.core.work import InitializationWork, Train
from psrpc.core.commands import Begin, SnapshotOrder
from psrpc.core.errors import StaleGeneration
from psrpc.core.policy import ASYNC
from tests.coordinator.sync_job import SYNC, begins, phase, rounds
from tests.coordinator.whole_coordinator import Coordinator, Shard, Worker, start


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_checkpoint_that_a_shard_cannot_restore_is_passed_over(tmp_path: Path, mode: str) -> None:
    changes = SYNC if mode == "sync" else {"train_records": 16}
    coordinator, worker = start(tmp_path, **changes, checkpoint_every=1)
    if mode == "sync":
        rounds(coordinator, worker, 1)
    else:
        worker.lease(worker.train(worker.batches()))
        coordinator.settle()
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"
    coordinator.shards[0].kill()
    new = coordinator.add(0, 20)
    new.error = "the file is torn"
    assert coordinator.job_run.restored == ""
    coordinator.disk.work()
    assert (phase(coordinator), coordinator.job_run.restored) == ("recovering", "step-00000001")
    coordinator.settle()
    assert (phase(coordinator), coordinator.job_run.restored) == ("training", "step-00000000")
    assert [begin.restore for begin in new.begins] == [
        "checkpoints/step-00000001",
        "checkpoints/step-00000000",
    ]
    assert coordinator.job_run.run.generation == 3
    assert coordinator.job_run.standing == (3, 0)
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000000"
    assert (
        "shard 0 cannot restore checkpoints/step-00000001: the file is torn"
        in coordinator.job_run.warnings.kept
    )
    coordinator.shards[0].kill()
    again = coordinator.add(coordinator.shards[0].index ^ 1, 30)
    again.error = "this one too"
    assert coordinator.job_run.restored == "", "the present generation's is another"
    coordinator.settle()
    assert phase(coordinator) == "failed"
    assert (
        "holds no parameters, and no checkpoint of this run is good" in coordinator.job_run.reason
    )


def test_checkpoints_that_shards_refuse_are_not_newer_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a job with another optimizer: set back, it goes on from where it was."""
    coordinator, worker = start(tmp_path, **SYNC, checkpoint_every=1)
    rounds(coordinator, worker, 1)
    newest = coordinator.store.newest_checkpoint()
    assert newest == ("step-00000001", 1, 1)
    coordinator.shards[0].kill()
    new = coordinator.add(0, 20)
    begin = Shard.begin

    def refuse(shard: Shard, order: Begin) -> None:
        shard.error = "the optimizer slots do not fit"
        begin(shard, order)

    monkeypatch.setattr(Shard, "begin", refuse)
    coordinator.settle()
    assert [order.restore for order in new.begins][-1] == "checkpoints/step-00000000"
    assert phase(coordinator) == "failed"
    assert coordinator.store.newest_checkpoint() == newest
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"


def test_a_shard_that_cannot_keep_what_it_holds_restores(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    rounds(coordinator, worker, 1)
    shards = list(coordinator.shards)
    coordinator.restart()
    shards[1].error = "the decision names attempts that are not here"
    for shard in shards:
        shard.connect()
    coordinator.settle()
    assert (
        begins(coordinator)
        == [Begin(3, 1, restore="checkpoints/step-00000000", settings=ASYNC)] * 2
    )
    assert coordinator.job_run.standing == (3, 0)


def test_a_shard_that_restores_another_round_than_the_checkpoint_is_of(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC, checkpoint_every=1)
    rounds(coordinator, worker, 1)
    for path in (tmp_path / "checkpoints" / "step-00000001").glob("shard-1*"):
        assert path.exists()
    coordinator.shards[0].kill()
    new = coordinator.add(0, 20)
    restore = new.restore

    def wrongly(checkpoint: str) -> None:
        restore(checkpoint)
        new.version += checkpoint.endswith("1")

    new.restore = wrongly  # type: ignore[method-assign]
    coordinator.settle()
    assert coordinator.job_run.standing == (3, 0)
    assert any("restored versions [1, 2]" in w for w in coordinator.job_run.warnings.kept)


def test_before_the_first_checkpoint_a_worker_initializes_again(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    for index in range(2):
        coordinator.add(index, 10 + index)
    coordinator.settle()
    worker = Worker(coordinator, 1)
    assert worker.lease() == InitializationWork()
    coordinator.shards[0].initialized = True
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    assert coordinator.shards[0].initialized is False
    with pytest.raises(StaleGeneration):
        coordinator.engine.report_initialized(worker.caller)
    worker.join()
    worker.initialize()
    assert coordinator.job_run.standing == (2, 0)


def test_shards_that_were_initialized_and_not_saved_are_saved_first(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    shards = [coordinator.add(index, 10 + index) for index in range(2)]
    coordinator.settle()
    worker = Worker(coordinator, 1)
    worker.lease()
    for shard in shards:
        shard.initialized = True
    coordinator.engine.report_initialized(worker.caller)
    coordinator.restart()
    for shard in shards:
        shard.connect()
    coordinator.settle()
    assert phase(coordinator) == "training"
    assert coordinator.job_run.restored == ""
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000000.g2"


def test_a_checkpoint_that_is_committed_when_its_generation_is_over_counts(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16, checkpoint_every=1)
    worker.lease(worker.train(worker.batches()))
    for shard in coordinator.shards:
        shard.obey()
    assert len(coordinator.disk.queue) == 1
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    coordinator.settle()
    assert begins(coordinator)[0] == Begin(
        2, 1, restore="checkpoints/step-00000001", settings=ASYNC
    )
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"
    assert coordinator.job_run.standing == (2, 1)


def test_a_snapshot_that_is_reported_when_its_generation_is_over_does_not(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16, checkpoint_every=1)
    worker.lease(worker.train(worker.batches()))
    coordinator.shards[0].kill()
    kept = coordinator.shards[0]
    order = kept.next()
    assert isinstance(order, SnapshotOrder)
    directory = tmp_path / order.directory
    assert directory.is_dir()
    coordinator.add(0, 20)
    assert not directory.exists()
    directory.mkdir()
    with pytest.raises(StaleGeneration):
        kept.take(order)


def test_a_final_checkpoint_of_another_history_is_not_what_the_shards_hold(tmp_path: Path) -> None:
    """One shard goes back to it, the other keeps what it holds: together they are a new state."""
    coordinator, worker = start(tmp_path, train_records=16, epochs=1, eval_records=8)
    done: list[Any] = []
    while isinstance(work := worker.lease(done), Train):
        done = worker.train(list(work.batches))
    coordinator.settle()
    assert phase(coordinator) == "finishing"
    final = coordinator.job_run.checkpoints.newest
    assert final == "checkpoints/step-00000004"
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    coordinator.settle()
    assert phase(coordinator) == "finishing"
    assert coordinator.job_run.checkpoints.newest == f"{final}.g2"
    shards = list(coordinator.shards)
    coordinator.restart()
    for shard in shards:
        shard.connect()
    coordinator.settle()
    assert coordinator.job_run.checkpoints.newest == f"{final}.g2"


def test_shards_that_keep_what_does_not_fit_together_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard's mistake must not make the coordinator form generations for ever."""
    coordinator, worker = start(tmp_path, **SYNC)
    for _ in range(2):
        worker.commit(worker.round())
    first, second = coordinator.shards
    coordinator.restart()
    monkeypatch.setattr(second, "apply", lambda _decision: None)
    for shard in (first, second):
        shard.connect()
    coordinator.settle()
    assert (first.version, second.version) == (0, 0)
    assert (
        begins(coordinator)
        == [Begin(3, 1, restore="checkpoints/step-00000000", settings=ASYNC)] * 2
    )
    assert any("rounds [0, 1] in generation 2" in w for w in coordinator.job_run.warnings.kept)
    assert phase(coordinator) == "training"
