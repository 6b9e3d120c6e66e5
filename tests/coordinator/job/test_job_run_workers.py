"""Workers of a whole coordinator: those that are silent, lapse, are refused or join anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.core.work import InitializationWork, Round, Wait
from coordinator.membership.membership import LEASE_S
from psrpc.core.commands import Revocation
from psrpc.core.errors import Forming, NotReady, StaleGeneration
from tests.coordinator.sync_job import SYNC
from tests.coordinator.whole_coordinator import Coordinator, Worker, start


def test_where_the_shards_are_is_said_when_all_have_begun(tmp_path: Path) -> None:
    coordinator, worker = start(tmp_path)
    kept, lost = coordinator.shards
    kept.kill()
    lost.kill()
    coordinator.add(1, 21)
    with pytest.raises(NotReady, match="shard 0 at h:0 to come back") as away:
        coordinator.engine.cluster_now(worker.name)
    assert not isinstance(away.value, Forming), "this needs a person"
    kept.watch()
    with pytest.raises(Forming, match=r"^the newest good checkpoint to be found"):
        coordinator.engine.cluster_now(worker.name)
    coordinator.disk.work()
    with pytest.raises(Forming, match="shards 0, 1 to begin generation 2"):
        coordinator.engine.cluster_now(worker.name)
    coordinator.settle()
    shards = coordinator.engine.cluster_now(worker.name)
    assert [shard.incarnation for shard in shards] == [10, 21]
    # A caller that only reads from shards has not registered.
    assert coordinator.engine.cluster_now(None) == shards
    with pytest.raises(StaleGeneration):
        coordinator.engine.cluster_now("stranger")
    with pytest.raises(StaleGeneration, match="a worker without a session"):
        coordinator.engine.cluster_now("")


def test_an_initializer_that_falls_silent_is_refused_before_another_begins(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    shards = [coordinator.add(index, 10 + index) for index in range(2)]
    coordinator.settle()
    first, second = Worker(coordinator, 1), Worker(coordinator, 2)
    assert first.lease() == InitializationWork()
    for _ in range(3):
        coordinator.clock.advance(LEASE_S / 2)
        for shard in shards:
            shard.beat()
        assert isinstance(second.lease(), Wait)
        coordinator.job_run.tick()
    shards[0].obey()
    assert isinstance(second.lease(), Wait)
    assert "shard 1 to refuse worker-0" in coordinator.job_run.waiting_for()
    shards[1].obey()
    assert second.lease() == InitializationWork()
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
            coordinator.job_run.tick()
        coordinator.settle()
        worker.join()
        return [w for w in coordinator.job_run.warnings.kept if "was taken for gone" in w]

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
    other = Worker(coordinator, 2)
    held = worker.round()
    [first, second] = coordinator.shards
    first.kill()
    coordinator.engine.sessions.leave(worker.name, "told to stop", fatal=False)
    assert second.next() == Revocation(1, "worker-0", (held.attempt,))
    first.watch()
    missed = [first.next(), first.next()]
    assert Revocation(1, "worker-0", (held.attempt,)) in missed
    assert other.round().attempt.batch != held.attempt.batch
    assert isinstance(other.commit(other.round()), Wait)
    second.kill()
    coordinator.add(1, 21)
    coordinator.settle()
    other.join()
    assert other.round().attempt.batch == held.attempt.batch
    assert coordinator.job_run.departures.waiting_for() == ""


def test_one_sign_of_life_may_say_that_several_workers_are_refused(tmp_path: Path) -> None:
    coordinator, first = start(tmp_path)
    second = Worker(coordinator, 2)
    held = [worker.batches()[0].batch for worker in (first, second)]
    for worker in (first, second):
        coordinator.engine.sessions.leave(worker.name, "", fatal=False)
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
    # One that has never asked for work is revoked on no shard.
    Worker(coordinator, 9).batches()
    coordinator.engine.sessions.leave("worker-1", "", fatal=False)
    coordinator.settle()
    coordinator.shards[1].kill()
    coordinator.add(1, 21)
    coordinator.settle()
    worker.join()
    worker.batches()
    first, second = coordinator.shards
    coordinator.engine.sessions.leave(worker.name, "", fatal=False)
    second.obey()
    first.generation, first.revoked = 1, 1
    first.beat()
    assert "shard 0 to refuse worker-0" in coordinator.job_run.waiting_for()
    first.generation = 2
    first.beat()
    assert "refuse" not in coordinator.job_run.waiting_for()


def test_a_worker_that_joins_anew_within_a_generation_never_does_an_attempt_again(
    tmp_path: Path,
) -> None:
    """One shard may have staged its gradient and another not, and the next may have other bits."""
    coordinator, worker = start(tmp_path, **SYNC)
    first, second = coordinator.shards
    # Leaves one micro-batch of the round to it.
    Worker(coordinator, 2)
    held = worker.round()
    worker.join()
    assert (worker.name, worker.generation) == ("worker-2", 1)
    assert first.next() == second.next() == Revocation(1, "worker-0", (held.attempt,))
    other = worker.round()
    assert other.attempt.batch != held.attempt.batch
    assert isinstance(worker.commit(other), Wait)
    worker.join()
    assert worker.name == "worker-2", "what is committed is on all shards"
    for shard in coordinator.shards:
        shard.carry_out(Revocation(1, "worker-0", (held.attempt,)))
    again = worker.round()
    assert again.attempt.batch == held.attempt.batch
    assert again.attempt.number > other.attempt.number


def test_work_that_comes_before_a_wait_begins_ends_it_at_once(tmp_path: Path) -> None:
    """A task that runs a little later awaits the answer to a call that found no work."""
    coordinator, worker = start(tmp_path, **SYNC)
    other = Worker(coordinator, 2)
    work = worker.round()
    assert isinstance(other.commit(other.round()), Wait)

    async def begin_to_wait() -> bool:
        waiting = asyncio.ensure_future(coordinator.engine.await_work(other.caller, received=0))
        worker.commit(work)
        await asyncio.sleep(0)
        found = waiting.done() and isinstance(waiting.result(), Round)
        waiting.cancel()
        return found

    assert asyncio.run(begin_to_wait())
