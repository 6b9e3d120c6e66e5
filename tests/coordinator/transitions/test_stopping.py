"""A job that is stopped: what is finished, what is saved, and what is not waited for."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from coordinator.checkpoints.cadence import REPEAT_S
from coordinator.checkpoints.checkpoints import Checkpoints
from coordinator.core.lifecycle import ENDED_EARLY, STOPPED
from coordinator.core.work import Train, Wait
from coordinator.membership.membership import LEASE_S
from coordinator.membership.shard_places import STARTING_S
from coordinator.records.stored_values import ENDED
from coordinator.transitions.stopping import FINISH_S, SAVE_S
from psrpc.core.commands import Decision, Ended, SnapshotOrder
from psrpc.core.errors import CheckpointError, NotReady
from psrpc.core.shard_reports import ShardFile, SnapshotReport
from tests.coordinator.sync_job import SYNC, phase, rounds
from tests.coordinator.sync_job import refuse as refuse_to_store
from tests.coordinator.whole_coordinator import Coordinator, Worker, start


def test_a_job_that_is_stopped_finishes_its_leases_and_saves(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    batches = worker.batches()
    coordinator.job_run.stop()
    assert phase(coordinator) == "stopping"
    other = Worker(coordinator, 2)
    assert isinstance(other.lease(), Wait)
    coordinator.settle()
    assert phase(coordinator) == "stopping"
    worker.lease(worker.train(batches))
    coordinator.settle()
    assert (coordinator.job_run.phase, coordinator.job_run.reason) == ("failed", STOPPED)
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"
    assert coordinator.store.get(ENDED)["reason"] == STOPPED
    # For those who take part it is no failure, whatever way they hear of it.
    assert [shard.ended for shard in coordinator.shards] == [Ended(False, STOPPED)] * 2
    assert worker.lease() == Ended(False, STOPPED)
    coordinator.engine.cluster_now(worker.name)
    coordinator.engine.shards.replaced(0)
    with pytest.raises(NotReady):
        coordinator.engine.cluster_now(worker.name)


def test_a_job_that_ends_early_is_done_with_what_it_has(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    batches = worker.batches()
    coordinator.job_run.end_early()
    coordinator.job_run.end_early()
    assert phase(coordinator) == "stopping"
    worker.lease(worker.train(batches))
    coordinator.settle()
    assert (coordinator.job_run.phase, coordinator.job_run.reason) == ("done", ENDED_EARLY)
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"
    assert coordinator.store.get(ENDED) == {"phase": "done", "reason": ENDED_EARLY}
    assert [shard.ended for shard in coordinator.shards] == [Ended(False)] * 2
    assert worker.lease() == Ended(False)


def test_a_stop_outdoes_an_early_end(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    worker.batches()
    coordinator.job_run.end_early()
    coordinator.job_run.stop()
    assert (coordinator.job_run.phase, coordinator.job_run.reason) == ("failed", STOPPED)


def test_a_sync_job_that_is_stopped_saves_after_its_last_decision(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    other = Worker(coordinator, 2)
    works = [worker.round(), other.round()]
    coordinator.job_run.stop()
    worker.commit(works[0])
    other.commit(works[1])
    commands = [coordinator.shards[0].next() for _ in range(2)]
    assert isinstance(commands[0], Decision)
    assert isinstance(commands[1], SnapshotOrder)
    for command in commands:
        assert command is not None
        coordinator.shards[0].carry_out(command)
    coordinator.settle()
    assert coordinator.job_run.reason == STOPPED
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"


def test_work_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    other = Worker(coordinator, 2)
    rounds(coordinator, worker, 1)
    held, works = worker.round(), other.round()
    coordinator.job_run.stop()
    other.commit(works)
    coordinator.tick(FINISH_S)
    # What comes now would make a round that the checkpoint has not.
    worker.commit(held)
    coordinator.settle()
    assert coordinator.job_run.reason == STOPPED
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"
    assert coordinator.job_run.standing == (1, 1)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_stop_saves_although_a_decision_that_orders_snapshots_was_never_stored(
    tmp_path: Path, evaluates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The decision to step 2 ends an epoch and carries a checkpoint, which may be evaluated.
    job = {**SYNC, "train_records": 32, "eval_records": 8 if evaluates else 0}
    coordinator, worker = start(tmp_path, **job, checkpoint_every=2)
    rounds(coordinator, worker, 1)
    with monkeypatch.context() as full:
        full.setattr(coordinator.store, "put_decision", refuse_to_store)
        rounds(coordinator, worker, 1)
        assert (tmp_path / "checkpoints" / ".tmp-step-00000002").is_dir()
        coordinator.job_run.stop()
        coordinator.tick(FINISH_S)
        coordinator.settle()
    assert coordinator.job_run.reason == STOPPED, "it does not wait for a snapshot that never comes"
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"
    assert coordinator.job_run.standing == (1, 1)
    assert not (tmp_path / "checkpoints" / ".tmp-step-00000002").exists()
    assert coordinator.job_run.training.orders.evaluations.idle


@pytest.mark.parametrize("how", ["again", "replaced", "lost", "time", "no work"])
def test_events_that_end_a_stop(tmp_path: Path, how: str) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    if how == "no work":
        coordinator.job_run.stop()
        assert phase(coordinator) == "failed"  # step 0 is saved
        return
    worker.lease(worker.train(worker.batches()))
    coordinator.job_run.stop()
    if how == "again":
        assert phase(coordinator) == "stopping"
        coordinator.job_run.stop()
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
        assert "snapshot step-00000001" in coordinator.job_run.waiting_for()
        coordinator.tick(SAVE_S)
    assert (coordinator.job_run.phase, coordinator.job_run.reason) == ("failed", STOPPED)


def test_a_drain_saves_and_leaves_a_run_that_has_not_ended(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    batches = worker.batches()
    coordinator.job_run.drain()
    assert phase(coordinator) == "stopping"
    shard = coordinator.shards[0]
    assert shard.beat(leaving=True) == (False, False)
    worker.lease(worker.train(batches))
    drained = [coordinator.job_run.drained]  # its checkpoint is not committed yet
    coordinator.settle()
    drained.append(coordinator.job_run.drained)
    assert drained == [False, True]
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"
    told = [coordinator.job_run.departures.all_told]
    assert shard.beat(leaving=True) == (False, True)
    told.append(coordinator.job_run.departures.all_told)
    assert told == [False, True]
    # For all others it is as if this coordinator had been killed.
    assert coordinator.store.get(ENDED) is None
    assert [shard.ended for shard in coordinator.shards] == [None] * 2
    assert isinstance(worker.lease(), Wait)
    coordinator.job_run.stop()
    assert coordinator.store.get(ENDED) is None, "too late"


@pytest.mark.parametrize("second", ["drain", "stop", "drain first"])
def test_a_second_signal_of_another_kind(tmp_path: Path, second: str) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    worker.batches()
    job_run = coordinator.job_run
    if second == "drain first":
        job_run.stop()
        job_run.drain()
        assert phase(coordinator) == "stopping"
        job_run.stop()
        assert (job_run.phase, job_run.reason, job_run.drained) == ("failed", STOPPED, False)
        return
    job_run.drain()
    if second == "drain":
        job_run.drain()
        assert (phase(coordinator), job_run.drained) == ("stopping", True)
        return
    job_run.stop()
    assert phase(coordinator) == "stopping"
    coordinator.tick(FINISH_S)
    coordinator.settle()
    assert (job_run.phase, job_run.reason, job_run.drained) == ("failed", STOPPED, False)


def test_a_drain_before_there_is_anything_to_save_leaves_at_once(tmp_path: Path) -> None:
    coordinator, _ = start(tmp_path, train_records=16)
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    assert phase(coordinator) == "recovering"
    coordinator.job_run.drain()
    assert coordinator.job_run.drained
    assert coordinator.store.get(ENDED) is None


def test_a_stop_waits_for_a_shard_that_stands_still(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    worker.lease(worker.train(worker.batches()))
    coordinator.job_run.stop()
    for _ in range(int(LEASE_S) + 2):
        coordinator.tick(1.0)
        coordinator.shards[1].beat()
    assert coordinator.job_run.members.places.waiting_for()
    assert phase(coordinator) == "stopping"
    coordinator.shards[0].beat()
    coordinator.settle()
    assert (coordinator.job_run.phase, coordinator.job_run.reason) == ("failed", STOPPED)
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001"


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


def refuse(coordinator: Coordinator, reason: str = "Input/output error") -> SnapshotOrder:
    """The next order that comes: the first shard cannot write it, the others do."""
    first, *others = coordinator.shards
    command = first.next()
    assert isinstance(command, SnapshotOrder)
    file = ShardFile(first.index, first.version)
    generation = coordinator.job_run.run.generation
    coordinator.engine.shards.report_snapshot(
        SnapshotReport(first.incarnation, generation, command.name, file, reason)
    )
    for shard in others:
        shard.obey()
    return command


@pytest.mark.parametrize("where", ["shard", "prepare", "commit", "is_damaged"])
def test_a_stop_saves_again_what_the_disk_has_refused_once(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    batches = worker.batches()
    refused: list[object] = []

    def fail(*arguments: object) -> bool:
        refused.append(arguments)
        if where == "is_damaged":
            return True
        raise CheckpointError("Input/output error")

    with monkeypatch.context() as disk:
        if where != "shard":
            disk.setattr(Checkpoints, where, fail)
        coordinator.job_run.stop()
        worker.lease(worker.train(batches))
        if where == "shard":
            refused.append(refuse(coordinator))
        coordinator.settle()
    assert refused
    assert phase(coordinator) == "stopping"
    coordinator.tick(REPEAT_S)
    coordinator.settle()
    assert coordinator.job_run.reason == STOPPED
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001.r1"
    assert not [w for w in coordinator.job_run.warnings.kept if "is not saved" in w]


def test_a_stop_that_cannot_save_ends_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    batches = worker.batches()
    refused: list[str] = []

    def full(_: Checkpoints, order: SnapshotOrder) -> NoReturn:
        refused.append(order.name)
        raise CheckpointError("no space")

    monkeypatch.setattr(Checkpoints, "prepare", full)
    began = coordinator.clock.now()
    coordinator.job_run.stop()
    worker.lease(worker.train(batches))
    while phase(coordinator) == "stopping":
        for shard in coordinator.shards:
            shard.beat()
        coordinator.tick()
    assert coordinator.clock.now() - began == FINISH_S + SAVE_S
    assert refused == ["step-00000001", *(f"step-00000001.r{n}" for n in range(1, 7))]
    assert coordinator.job_run.reason == STOPPED
    [warning] = [w for w in coordinator.job_run.warnings.kept if "is not saved" in w]
    assert warning == (
        "the job stops, and its state of step 1 is not saved: after 60 s it waits for a checkpoint "
        "to be committed, of which the last failed: PS401: no space; a run that goes on without "
        "these shards does so from checkpoints/step-00000000: 1 step is done again"
    )


def test_a_shard_that_leaves_waits_until_a_state_is_saved_and_not_for_a_failed_try(
    tmp_path: Path,
) -> None:
    coordinator, worker = start(tmp_path, train_records=16)
    worker.lease(worker.train(worker.batches()))
    shard = coordinator.shards[1]
    assert shard.beat(leaving=True) == (False, False)
    refuse(coordinator)
    assert shard.beat(leaving=True) == (False, False), "nothing is saved"
    coordinator.settle()
    assert shard.beat(leaving=True) == (False, False), "not at once"
    coordinator.clock.advance(REPEAT_S)
    assert shard.beat(leaving=True) == (False, False)
    coordinator.settle()
    assert coordinator.job_run.checkpoints.newest == "checkpoints/step-00000001.r1"
    assert shard.beat(leaving=True) == (False, True)
