"""A job that is stopped: what is finished, what is saved, and what is not waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.course import LEASE_S
from coordinator.membership import STARTING_S
from coordinator.stopping import FINISH_S, SAVE_S, STOPPED
from coordinator.store import ENDED
from coordinator.work import (
    Decision,
    Ended,
    SnapshotOrder,
    Train,
    Wait,
)
from psrpc.errors import NotReady
from tests.coordinator.bench import Worker, start
from tests.coordinator.course_bench import SYNC, phase, rounds


def test_a_job_that_is_stopped_finishes_its_leases_and_saves(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    batches = worker.batches()
    coordinator.course.stop()
    assert phase(coordinator) == "stopping"
    other = Worker(coordinator, 2)
    assert isinstance(other.lease(), Wait)
    coordinator.settle()
    assert phase(coordinator) == "stopping"
    worker.lease(worker.train(batches))
    coordinator.settle()
    assert (coordinator.course.phase, coordinator.course.reason) == ("failed", STOPPED)
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000001"
    assert coordinator.store.get(ENDED)["reason"] == STOPPED
    # For those who take part it is no failure, whatever way they hear of it.
    assert [shard.ended for shard in coordinator.shards] == [Ended(False, STOPPED)] * 2
    assert worker.lease() == Ended(False, STOPPED)
    coordinator.engine.cluster_now(worker.name, 1)
    coordinator.course.shard_replaced(0)
    with pytest.raises(NotReady):
        coordinator.engine.cluster_now(worker.name, 1)


def test_a_sync_job_that_is_stopped_saves_after_its_last_decision(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    works = [worker.round()]
    other = Worker(coordinator, 2)
    works.append(other.round())
    coordinator.course.stop()
    worker.commit(works[0])
    other.commit(works[1])
    commands = [coordinator.shards[0].next() for _ in range(2)]
    assert isinstance(commands[0], Decision)
    assert isinstance(commands[1], SnapshotOrder)
    for command in commands:
        assert command is not None
        coordinator.shards[0].carry_out(command)
    coordinator.settle()
    assert coordinator.course.reason == STOPPED
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000001"


def test_work_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    rounds(coordinator, worker, 1)
    held = worker.round()
    other = Worker(coordinator, 2)
    works = other.round()
    coordinator.course.stop()
    other.commit(works)
    coordinator.tick(FINISH_S)
    # What comes now would make a round that the checkpoint has not.
    worker.commit(held)
    coordinator.settle()
    assert coordinator.course.reason == STOPPED
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000001"
    assert coordinator.course.standing == (1, 1)


@pytest.mark.parametrize("how", ["again", "replaced", "lost", "time", "no work"])
def test_what_ends_a_stop(tmp_path: Path, how: str) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    if how == "no work":
        coordinator.course.stop()
        assert phase(coordinator) == "failed"  # step 0 is saved
        return
    worker.lease(worker.train(worker.batches()))
    coordinator.course.stop()
    if how == "again":
        assert phase(coordinator) == "stopping"
        coordinator.course.stop()
    elif how == "replaced":
        coordinator.shards[0].kill()
        coordinator.add(0, 20)
    elif how == "lost":
        coordinator.shards[0].kill()
        coordinator.tick(STARTING_S)
        assert phase(coordinator) == "stopping"
        coordinator.tick()
    else:
        coordinator.tick(FINISH_S)
        assert "snapshot step-00000001" in coordinator.course.waiting_for()
        coordinator.tick(SAVE_S)
    assert (coordinator.course.phase, coordinator.course.reason) == ("failed", STOPPED)


def test_a_stop_waits_for_a_shard_that_stands_still(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    worker.lease(worker.train(worker.batches()))
    coordinator.course.stop()
    for _ in range(int(LEASE_S) + 2):
        coordinator.tick(1.0)
        coordinator.shards[1].beat()
    assert coordinator.course.members.waiting_for_shards()
    assert phase(coordinator) == "stopping"
    coordinator.shards[0].beat()
    coordinator.settle()
    assert (coordinator.course.phase, coordinator.course.reason) == ("failed", STOPPED)
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000001"


def test_a_shard_that_leaves_waits_for_a_checkpoint_after_its_word(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16, checkpoint_every=1)
    worker.lease(worker.train(worker.batches()))
    shard = coordinator.shards[0]
    coordinator.settle()
    assert shard.beat(leaving=True) == (False, True)  # the checkpoint has all that is done
    worker.lease(worker.train(worker.batches()))
    coordinator.shards[1].kill()
    new = coordinator.add(1, 21)
    assert shard.beat(leaving=True) == (False, True)  # a generation is formed, nothing to save
    coordinator.settle()
    worker.join()
    work = worker.lease()
    assert isinstance(work, Train)
    worker.lease(worker.train(list(work.batches)))
    assert new.beat(leaving=True) == (False, False)
    coordinator.settle()
    assert new.beat(leaving=True) == (False, True)
