"""A whole coordinator through losses: what is kept, what is refused, what is done again."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.core.figures import WorkerHeartbeat
from coordinator.records.stored_values import ENDED
from psrpc.core.commands import Begin
from psrpc.core.errors import StaleGeneration
from psrpc.core.policy import ASYNC
from tests.coordinator.sync_job import SYNC, begins, phase, rounds
from tests.coordinator.whole_coordinator import Worker, start


def test_a_report_that_comes_after_its_shard_fell_back_counts_nothing(tmp_path: Path) -> None:
    """The hole that the protocol had: the batch is on one shard only by then."""
    coordinator, worker = start(tmp_path)
    batches = worker.batches()
    late = worker.train(batches)
    lost = coordinator.shards[0]
    lost.kill()
    new = coordinator.add(0, 20)
    with pytest.raises(StaleGeneration):
        worker.lease(late)
    coordinator.settle()
    assert begins(coordinator) == [
        Begin(2, 1, restore="checkpoints/step-00000000", settings=ASYNC),
        Begin(2, 1, keep=True, settings=ASYNC),
    ]
    with pytest.raises(StaleGeneration, match="generation 1; it is 2"):
        worker.lease(late)
    assert coordinator.engine.heartbeat_worker(worker.name, WorkerHeartbeat(1, late)) == (
        False,
        None,
    )
    assert coordinator.job_run.training.span.batches == 0
    worker.join()
    [again] = worker.batches()
    assert again.batch == batches[0].batch
    assert again.number > 1 << 40
    assert new.version == 0


def test_a_batch_on_every_shard_is_done_even_if_its_report_was_lost(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    [batch] = worker.batches()
    worker.train([batch])
    shards = list(coordinator.shards)
    coordinator.restart()
    assert phase(coordinator) == "recovering"
    assert coordinator.job_run.waiting_for() == "shards 0, 1 to register"
    for shard in shards:
        shard.connect()
    coordinator.settle()
    assert coordinator.job_run.training.span.batches == 1
    worker.join()
    assert worker.batches()[0].batch != batch.batch


def test_a_restarted_coordinator_costs_only_the_step(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    done = worker.train(worker.batches())
    [other] = worker.batches(done)
    shards = list(coordinator.shards)
    coordinator.restart()
    coordinator.look()
    with pytest.raises(StaleGeneration, match="worker-0 is not registered"):
        worker.lease()
    for shard in shards:
        assert shard.beat() == (True, False)
        with pytest.raises(StaleGeneration, match="has not registered"):
            shard.watch()
        shard.connect()
    coordinator.settle()
    assert begins(coordinator) == [Begin(2, 1, keep=True, settings=ASYNC)] * 2
    worker.join()
    assert worker.name == "worker-0"
    assert coordinator.job_run.standing == (2, 1)
    [again] = worker.batches()
    assert again.batch == other.batch


@pytest.mark.parametrize("seen_by", [(), (0,), (1,), (0, 1)])
def test_a_stored_decision_stands_whichever_shards_have_seen_it(
    tmp_path: Path, seen_by: tuple[int, ...]
) -> None:
    """The coordinator dies when it has stored a decision; it may have reached some."""
    coordinator, worker = start(tmp_path, **SYNC)
    rounds(coordinator, worker, 1)
    for _ in range(2):
        worker.commit(worker.round())
    shards = list(coordinator.shards)
    for index in seen_by:
        shards[index].obey()
    coordinator.restart()
    for shard in shards:
        shard.connect()
    coordinator.settle()
    assert [begin.keep for begin in begins(coordinator)] == [True, True]
    assert [shard.version for shard in shards] == [2, 2]
    worker.join()
    work = worker.round()
    assert (work.round, work.decision) == (2, None)
    assert coordinator.job_run.standing == (2, 2)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_two_restarts_while_a_generation_is_formed(tmp_path: Path, mode: str) -> None:
    coordinator, worker = start(tmp_path, **(SYNC if mode == "sync" else {}))
    if mode == "sync":
        rounds(coordinator, worker, 1)
        for _ in range(2):
            worker.commit(worker.round())
    else:
        worker.lease(worker.train(worker.batches()))
    first, second = coordinator.shards
    versions = [shard.version for shard in (first, second)]
    for _ in range(2):
        coordinator.restart()
        first.connect()
        second.connect()
        first.obey()  # the second has not heard
    assert (first.generation, second.generation) == (3, 1)
    coordinator.restart()
    first.connect()
    second.connect()
    coordinator.settle()
    assert [begin.keep for begin in begins(coordinator)] == [True, True]
    assert first.version == second.version
    assert first.version == (versions[0] + 1 if mode == "sync" else versions[0])
    assert coordinator.job_run.run.generation == 4
    assert phase(coordinator) == "training"


def test_two_shards_are_replaced_one_after_the_other_while_a_generation_is_formed(
    tmp_path: Path,
) -> None:
    coordinator, worker = start(tmp_path, shards=3)
    worker.lease(worker.train(worker.batches()))
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    coordinator.disk.work()
    for shard in coordinator.shards:
        if shard.index != 1:
            shard.obey()
    lost = next(shard for shard in coordinator.shards if shard.index == 1)
    lost.kill()
    coordinator.add(1, 21)
    with pytest.raises(StaleGeneration, match="taken over"):
        lost.connect()
    coordinator.settle()
    assert coordinator.job_run.run.generation == 3
    assert [bool(begin.restore) for begin in begins(coordinator)] == [False, True, False]
    assert phase(coordinator) == "training"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_all_processes_are_lost_at_once(tmp_path: Path, mode: str) -> None:
    changes = SYNC if mode == "sync" else {"train_records": 16}
    coordinator, worker = start(tmp_path, **changes, checkpoint_every=1)
    if mode == "sync":
        rounds(coordinator, worker, 1)
        worker.commit(worker.round())
    else:
        worker.lease(worker.train(worker.batches()))
        coordinator.settle()
        worker.train(worker.batches())
    coordinator.restart()
    for index in range(2):
        coordinator.add(index, 20 + index)
    coordinator.settle()
    assert (
        begins(coordinator)
        == [Begin(2, 1, restore="checkpoints/step-00000001", settings=ASYNC)] * 2
    )
    assert coordinator.job_run.standing == (2, 1)
    worker = Worker(coordinator, 2)
    assert worker.name == "worker-1"
    work = worker.round().attempt if mode == "sync" else worker.batches()[0]
    assert work.batch.first == (8 if mode == "sync" else 4)


def test_a_lost_shard_takes_a_sync_job_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC, checkpoint_every=2)
    rounds(coordinator, worker, 3)
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    assert (
        begins(coordinator)
        == [Begin(2, 1, restore="checkpoints/step-00000002", settings=ASYNC)] * 2
    )
    assert coordinator.job_run.standing == (2, 2)
    worker.join()
    rounds(coordinator, worker, 2)
    assert phase(coordinator) == "done"
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000004.g2"
    assert coordinator.store.get(ENDED) == {"phase": "done", "reason": ""}


def test_decisions_of_before_a_fall_are_not_for_those_after(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC, checkpoint_every=2)
    rounds(coordinator, worker, 3)
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    shards = list(coordinator.shards)
    coordinator.restart()
    for shard in shards:
        shard.connect()
    coordinator.settle()
    assert begins(coordinator) == [Begin(3, 1, keep=True, settings=ASYNC)] * 2
    assert coordinator.job_run.standing == (3, 2)


def test_a_zombie_shard_cannot_take_its_place_back_from_a_restarted_coordinator(
    tmp_path: Path,
) -> None:
    coordinator, _ = start(tmp_path)
    zombie = coordinator.shards[0]
    zombie.kill()
    coordinator.add(0, 20)
    coordinator.settle()
    coordinator.restart()
    with pytest.raises(StaleGeneration, match="taken over"):
        zombie.connect()
