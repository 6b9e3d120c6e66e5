"""A whole coordinator through losses: what is kept, what is refused, what is done again."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.course import LEASE_S
from coordinator.disk import Choice
from coordinator.membership import STARTING_S
from coordinator.stopping import FINISH_S, SAVE_S, STOPPED
from coordinator.store import ENDED, GENERATION
from coordinator.work import (
    Begin,
    Decision,
    Ended,
    Initialize,
    Revocation,
    SnapshotOrder,
    Train,
    Wait,
)
from psrpc.errors import Forming, NotReady, StaleGeneration
from psrpc.policy import ASYNC
from tests.coordinator.bench import Coordinator, Worker, start

SYNC: dict[str, Any] = {
    "mode": "sync",
    "replicas": 2,
    "epochs": 2,
    "train_records": 16,
    "total_updates": 4,
}


def rounds(coordinator: Coordinator, worker: Worker, count: int) -> None:
    """One worker does whole rounds."""
    for _ in range(2 * count):
        worker.commit(worker.round())
    coordinator.settle()


def phase(coordinator: Coordinator) -> str:
    return coordinator.course.phase


def begins(coordinator: Coordinator) -> list[Begin]:
    """What each shard was told last; all are told the policy that stands."""
    ordered = sorted(coordinator.shards, key=lambda shard: shard.index)
    told = [shard.begins[-1] for shard in ordered]
    run = coordinator.course.run
    assert {(begin.policy, begin.settings) for begin in told} == {(run.policy, run.settings)}
    return [replace(begin, settings=ASYNC) for begin in told]


def refuse(*_: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


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
        Begin(2, 1, restore="checkpoints/step-00000000"),
        Begin(2, 1, keep=True),
    ]
    with pytest.raises(StaleGeneration, match="generation 1; it is 2"):
        worker.lease(late)
    assert coordinator.engine.heartbeat_worker(worker.name, 1, 1, late, "") == (False, None)
    assert coordinator.course.training.span.batches == 0
    worker.join()
    [again] = worker.batches()
    assert again.batch == batches[0].batch
    assert again.number > 1 << 40
    assert new.version == 0


def test_what_every_shard_has_is_done_after_all_was_lost_but_the_report(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    [batch] = worker.batches()
    worker.train([batch])
    shards = list(coordinator.shards)
    coordinator.restart()
    assert phase(coordinator) == "recovering"
    assert coordinator.course.waiting_for() == "shards 0, 1 to register"
    for shard in shards:
        shard.connect()
    coordinator.settle()
    assert coordinator.course.training.span.batches == 1
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
    assert begins(coordinator) == [Begin(2, 1, keep=True)] * 2
    worker.join()
    assert worker.name == "worker-0"
    assert coordinator.course.standing == (2, 1)
    [again] = worker.batches()
    assert again.batch == other.batch


@pytest.mark.parametrize("seen_by", [(), (0,), (1,), (0, 1)])
def test_a_decision_that_was_stored_stands_whoever_has_seen_it(
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
    assert coordinator.course.standing == (2, 2)


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
    assert coordinator.course.run.generation == 4
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
    assert coordinator.course.run.generation == 3
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
    assert begins(coordinator) == [Begin(2, 1, restore="checkpoints/step-00000001")] * 2
    assert coordinator.course.standing == (2, 1)
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
    assert begins(coordinator) == [Begin(2, 1, restore="checkpoints/step-00000002")] * 2
    assert coordinator.course.standing == (2, 2)
    worker.join()
    rounds(coordinator, worker, 2)
    assert phase(coordinator) == "done"
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000004.g2"
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
    assert begins(coordinator) == [Begin(3, 1, keep=True)] * 2
    assert coordinator.course.standing == (3, 2)


def test_no_generation_goes_out_that_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(coordinator.store, "put_all", refuse)
        shards = [coordinator.add(index, 10 + index) for index in range(2)]
        coordinator.settle()
        coordinator.tick()
        coordinator.settle()
        assert [shard.begins for shard in shards] == [[], []]
        assert coordinator.course.warnings.kept == [
            "generation 1 cannot be stored: database or disk is full; tried again"
        ]
        assert phase(coordinator) == "waiting"
    coordinator.tick()
    coordinator.settle()
    assert coordinator.store.get(GENERATION) == 1
    assert phase(coordinator) == "initializing"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_checkpoint_that_a_shard_cannot_restore_is_passed_over(tmp_path: Path, mode: str) -> None:
    changes = SYNC if mode == "sync" else {"train_records": 16}
    coordinator, worker = start(tmp_path, **changes, checkpoint_every=1)
    if mode == "sync":
        rounds(coordinator, worker, 1)
    else:
        worker.lease(worker.train(worker.batches()))
        coordinator.settle()
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000001"
    coordinator.shards[0].kill()
    new = coordinator.add(0, 20)
    new.error = "the file is torn"
    coordinator.settle()
    assert [begin.restore for begin in new.begins] == [
        "checkpoints/step-00000001",
        "checkpoints/step-00000000",
    ]
    assert coordinator.course.run.generation == 3
    assert coordinator.course.standing == (3, 0)
    assert (
        "shard 0 cannot restore checkpoints/step-00000001: the file is torn"
        in coordinator.course.warnings.kept
    )
    coordinator.shards[0].kill()
    again = coordinator.add(coordinator.shards[0].index ^ 1, 30)
    again.error = "this one too"
    coordinator.settle()
    assert phase(coordinator) == "failed"
    assert "holds no parameters, and no checkpoint of this run is good" in coordinator.course.reason


def test_a_shard_that_cannot_keep_what_it_holds_restores(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    rounds(coordinator, worker, 1)
    shards = list(coordinator.shards)
    coordinator.restart()
    shards[1].error = "the decision names attempts that are not here"
    for shard in shards:
        shard.connect()
    coordinator.settle()
    assert begins(coordinator) == [Begin(3, 1, restore="checkpoints/step-00000000")] * 2
    assert coordinator.course.standing == (3, 0)


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
    assert coordinator.course.standing == (3, 0)
    assert any("restored versions [1, 2]" in w for w in coordinator.course.warnings.kept)


def test_before_the_first_checkpoint_a_worker_initializes_again(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    for index in range(2):
        coordinator.add(index, 10 + index)
    coordinator.settle()
    worker = Worker(coordinator, 1)
    assert worker.lease() == Initialize()
    coordinator.shards[0].initialized = True
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    assert coordinator.shards[0].initialized is False
    with pytest.raises(StaleGeneration):
        coordinator.engine.report_initialized(worker.caller)
    worker.join()
    worker.initialize()
    assert coordinator.course.standing == (2, 0)


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
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000000.g2"


def test_a_checkpoint_that_is_committed_when_its_generation_is_over_counts(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path, train_records=16, checkpoint_every=1)
    worker.lease(worker.train(worker.batches()))
    for shard in coordinator.shards:
        shard.obey()
    assert len(coordinator.disk.queue) == 1
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    coordinator.settle()
    assert begins(coordinator)[0] == Begin(2, 1, restore="checkpoints/step-00000001")
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000001"
    assert coordinator.course.standing == (2, 1)


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


def test_where_the_shards_are_is_said_when_all_have_begun(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    kept, lost = coordinator.shards
    kept.kill()
    lost.kill()
    coordinator.add(1, 21)
    with pytest.raises(NotReady, match="shard 0 at h:0 to come back") as away:
        coordinator.engine.cluster_now(worker.name, 1)
    assert not isinstance(away.value, Forming), "this is for somebody to mend"
    kept.watch()
    with pytest.raises(Forming, match="shard 1 at h:1 to start; the newest good checkpoint"):
        coordinator.engine.cluster_now(worker.name, 1)
    coordinator.disk.work()
    with pytest.raises(Forming, match="shard 0, 1 to begin generation 2"):
        coordinator.engine.cluster_now(worker.name, 1)
    coordinator.settle()
    shards = coordinator.engine.cluster_now(worker.name, 1)
    assert [shard.incarnation for shard in shards] == [10, 21]
    # Whoever only reads from shards has not registered.
    assert coordinator.engine.cluster_now("", 0) == shards
    with pytest.raises(StaleGeneration):
        coordinator.engine.cluster_now("nobody", 0)


def test_an_initializer_that_falls_silent_is_refused_before_another_begins(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    shards = [coordinator.add(index, 10 + index) for index in range(2)]
    coordinator.settle()
    first, second = Worker(coordinator, 1), Worker(coordinator, 2)
    assert first.lease() == Initialize()
    for _ in range(3):
        coordinator.clock.advance(LEASE_S / 2)
        for shard in shards:
            shard.beat()
        assert isinstance(second.lease(), Wait)
        coordinator.course.tick()
    shards[0].obey()
    assert isinstance(second.lease(), Wait)
    assert "shard 1 to refuse worker-0" in coordinator.course.waiting_for()
    shards[1].obey()
    assert second.lease() == Initialize()
    with pytest.raises(StaleGeneration, match="taken for gone"):
        coordinator.engine.report_initialized(first.caller)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_that_lapses_again_and_again_is_named_with_the_cure(
    tmp_path: Path, mode: str
) -> None:
    changes = SYNC if mode == "sync" else {"train_records": 16}
    coordinator, worker = start(tmp_path, **changes)

    def work() -> None:
        if mode == "sync":
            worker.commit(worker.round())
        else:
            worker.lease(worker.train(worker.batches()))

    def lapse() -> list[str]:
        for _ in range(3):
            coordinator.clock.advance(LEASE_S / 2)
            for shard in coordinator.shards:
                shard.beat()
            coordinator.course.tick()
        coordinator.settle()
        worker.join()
        return [w for w in coordinator.course.warnings.kept if "was taken for gone" in w]

    assert not lapse()
    assert not lapse()
    work()
    assert not lapse(), "a batch was done in between"
    assert not lapse()
    [warning] = lapse()
    assert warning.startswith("worker-4 (pid 1 on h) was taken for gone 3 times")
    assert "smaller batches" in warning
    assert lapse() == [warning], "it is said once"


def test_a_revocation_is_repeated_to_a_shard_that_missed_it_and_not_in_a_new_generation(
    tmp_path: Path,
) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    held = worker.round()
    [first, second] = coordinator.shards
    first.kill()
    coordinator.engine.leave_worker(worker.name, 1, "told to stop", fatal=False)
    assert second.next() == Revocation(1, "worker-0", (held.attempt,))
    first.watch()
    missed = [first.next(), first.next()]
    assert Revocation(1, "worker-0", (held.attempt,)) in missed
    other = Worker(coordinator, 2)
    assert other.round().attempt.batch != held.attempt.batch
    assert isinstance(other.commit(other.round()), Wait)
    second.kill()
    coordinator.add(1, 21)
    coordinator.settle()
    other.join()
    assert other.round().attempt.batch == held.attempt.batch
    assert coordinator.course.departures.waiting_for() == ""


def test_one_sign_of_life_may_say_that_several_workers_are_refused(tmp_path: Path) -> None:
    coordinator, first = start(tmp_path)
    second = Worker(coordinator, 2)
    held = [worker.batches()[0].batch for worker in (first, second)]
    for worker in (first, second):
        coordinator.engine.leave_worker(worker.name, worker.incarnation, "", fatal=False)
    for shard in coordinator.shards:
        while (command := shard.next()) is not None:
            assert isinstance(command, Revocation)
            shard.revoked = command.number
        shard.beat()
    third = Worker(coordinator, 3)
    [one] = third.batches()
    [other] = third.batches(third.train([one]))
    assert sorted([one.batch, other.batch]) == sorted(held)


def test_a_sign_of_life_of_a_generation_before_says_nothing_of_this_ones_revocations(
    tmp_path: Path,
) -> None:
    coordinator, worker = start(tmp_path)
    Worker(coordinator, 9)
    coordinator.engine.leave_worker("worker-1", 9, "", fatal=False)
    coordinator.settle()
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    worker.join()
    worker.batches()
    first, second = coordinator.shards
    coordinator.engine.leave_worker(worker.name, 1, "", fatal=False)
    second.obey()
    first.generation, first.revoked = 1, 1
    first.beat()
    assert "shard 0 to refuse worker-0" in coordinator.course.waiting_for()
    first.generation = 2
    first.beat()
    assert "refuse" not in coordinator.course.waiting_for()


def test_a_decision_that_waits_for_the_disk_is_dropped_with_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, worker = start(tmp_path, **SYNC)
    with monkeypatch.context() as full:
        full.setattr(coordinator.store, "put_decision", refuse)
        for _ in range(2):
            worker.commit(worker.round())
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.tick()
    assert coordinator.store.last_decision(0) is None
    coordinator.settle()
    coordinator.tick()
    assert coordinator.course.standing == (2, 0)
    assert coordinator.store.last_decision(0) is None
    assert coordinator.shards[0].version == 0


def test_a_disk_that_does_not_say_which_checkpoint_is_good_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = start(tmp_path)
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    for _ in range(3):
        coordinator.tick()
    assert len(coordinator.disk.queue) == 1
    with monkeypatch.context() as broken:
        broken.setattr("coordinator.disk.choose", lambda *_: Choice(None, "EIO", again=True))
        coordinator.disk.work()
        assert phase(coordinator) == "recovering"
        assert "EIO; tried again" in coordinator.course.warnings.kept
    coordinator.tick()
    coordinator.settle()
    assert phase(coordinator) == "training"


def test_a_final_checkpoint_of_another_history_is_not_what_the_shards_hold(tmp_path: Path) -> None:
    """One shard goes back to it, the other keeps what it holds: together they are a new state."""
    coordinator, worker = start(tmp_path, train_records=16, epochs=1, eval_records=8)
    done: list[Any] = []
    while isinstance(work := worker.lease(done), Train):
        done = worker.train(list(work.batches))
    coordinator.settle()
    assert phase(coordinator) == "finishing"
    final = coordinator.course.checkpoints.newest
    assert final == "checkpoints/step-00000004"
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    coordinator.settle()
    assert phase(coordinator) == "finishing"
    assert coordinator.course.checkpoints.newest == f"{final}.g2"
    shards = list(coordinator.shards)
    coordinator.restart()
    for shard in shards:
        shard.connect()
    coordinator.settle()
    assert coordinator.course.checkpoints.newest == f"{final}.g2"


def test_a_choice_is_kept_while_its_generation_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = start(tmp_path)
    coordinator.shards[0].kill()
    coordinator.add(0, 20)
    with monkeypatch.context() as full:
        full.setattr(coordinator.store, "put_all", refuse)
        coordinator.settle()
        coordinator.tick()
        assert coordinator.disk.queue == []
        assert coordinator.course.run.generation == 1
    coordinator.tick()
    assert coordinator.course.run.generation == 2


def test_a_worker_that_joins_anew_within_a_generation_never_does_an_attempt_again(
    tmp_path: Path,
) -> None:
    """One shard may have staged its gradient and another not, and the next may have other bits."""
    coordinator, worker = start(tmp_path, **SYNC)
    first, second = coordinator.shards
    held = worker.round()
    worker.join()
    assert (worker.name, worker.generation) == ("worker-1", 1)
    assert first.next() == second.next() == Revocation(1, "worker-0", (held.attempt,))
    other = worker.round()
    assert other.attempt.batch != held.attempt.batch
    assert isinstance(worker.commit(other), Wait)
    worker.join()
    assert worker.name == "worker-1", "what is committed is on all shards"
    for shard in coordinator.shards:
        shard.carry_out(Revocation(1, "worker-0", (held.attempt,)))
    again = worker.round()
    assert again.attempt.batch == held.attempt.batch
    assert again.attempt.number > other.attempt.number


def test_shards_that_keep_what_does_not_fit_together_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a mistake of theirs; nobody may form generations for ever because of it."""
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
    assert begins(coordinator) == [Begin(3, 1, restore="checkpoints/step-00000000")] * 2
    assert any("rounds [0, 1] in generation 2" in w for w in coordinator.course.warnings.kept)
    assert phase(coordinator) == "training"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_shards_whose_checkpoint_could_not_be_noted_go_on_where_they_are(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("coordinator.store.Store.put_checkpoint", refuse)
        coordinator, worker = start(tmp_path, **(SYNC if mode == "sync" else {}))
        if mode == "sync":
            rounds(coordinator, worker, 1)
        else:
            worker.lease(worker.train(worker.batches()))
        shards = list(coordinator.shards)
        coordinator.restart()
        for shard in shards:
            shard.connect()
        coordinator.settle()
    assert phase(coordinator) == "training"
    assert coordinator.course.checkpoints.newest == "checkpoints/step-00000001.g2"


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


# Stopping.


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
    assert coordinator.course.members.waiting_for_shards(coordinator.clock.now())
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
