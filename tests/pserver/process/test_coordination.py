"""A shard and its coordinator: what it is told, what it answers, and what it does without it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import TypeVar

import pytest
import structlog

from pserver.client.client import ShardClient
from pserver.process import ending as ending_module
from pserver.process.ending import Ending
from psrpc.core.batch import BatchId
from psrpc.core.errors import JobMismatch, NotReady, Preparing, RemoteFailure, StaleGeneration
from psrpc.ops.clock import ManualClock
from psrpc.ops.exit_status import DONE
from psrpc.ops.threads import Threads
from psrpc.v1 import coordinator_pb2 as pb
from tests.pserver.fake_coordinator import WAIT_S, FakeCoordinator, begin_at, running
from tests.pserver.process.test_shard import shard, worker
from tests.pserver.shards import (
    AUTHORITY,
    INITIAL,
    ONE_TRY,
    counting,
    fence_of,
    leased,
    part,
    plan_of,
    whole,
)

PLAN = plan_of()
A, B = BatchId(0, 0, 5), BatchId(0, 5, 5)

Message = TypeVar("Message")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with running(FakeCoordinator(tmp_path, PLAN)) as fake:
        yield fake


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that waits to be saved does not get away with giving up."""
    monkeypatch.setattr("pserver.process.ending.STAY_S", 2 * WAIT_S)


def until(messages: Queue[Message], wanted: Callable[[Message], bool]) -> Message:
    """The first that is wanted."""
    while not wanted(message := messages.get(timeout=WAIT_S)):
        pass
    return message


def push(client: ShardClient, batch: BatchId, generation: int = 1, name: str = "w") -> str:
    """Pushes a gradient of 1s and returns the result."""
    gradient = leased(name, batch, 1, 0, part(PLAN, whole(PLAN, 1.0)), generation=generation)
    return client.push(fence_of(client, generation, worker=name), gradient).outcome


def trained(client: ShardClient) -> None:
    """Initializes the shard and applies batch A."""
    client.initialize(fence_of(client), counting(PLAN), INITIAL)
    assert push(client, A) == "applied"


def over(coordinator: FakeCoordinator, future: Future[None]) -> None:
    """The job ends, and the shard with it."""
    coordinator.commands.put(pb.WatchResponse(shutdown=pb.Shutdown()))
    assert future.exception(WAIT_S) is None


def test_heartbeats_say_how_stale_gradients_are_and_whose(coordinator: FakeCoordinator) -> None:
    with shard(coordinator) as future, worker(coordinator) as client:
        trained(client)
        assert push(client, B, name="late") == "applied"
        beat = until(coordinator.heartbeats, lambda beat: beat.applied == 2)
        assert {w.worker: list(w.counts) for w in beat.workers} == {"w": [1], "late": [0, 1]}
        assert list(beat.staleness_counts) == [1, 1]
        assert (beat.too_stale, beat.uncompensated) == (0, 0)
        assert beat.apply_s > 0
        over(coordinator, future)


# -- orders ----------------------------------------------------------------------------------


def test_no_call_is_served_before_the_first_order(coordinator: FakeCoordinator) -> None:
    coordinator.begin = pb.Begin()
    coordinator.awaited = "shard 1 to register"
    with shard(coordinator) as future:
        registered = coordinator.registered.get(timeout=WAIT_S)
        watched = coordinator.watches.get(timeout=WAIT_S)
        assert (watched.generation, watched.initialized, watched.version) == (0, False, 0)
        with ShardClient(
            registered.address, registered.incarnation, PLAN, 0, retry=ONE_TRY
        ) as client:
            with pytest.raises(NotReady, match="shard 0 is starting"):
                client.initialize(fence_of(client), counting(PLAN), INITIAL)
            until(coordinator.heartbeats, lambda beat: beat.waiting_for == coordinator.awaited)
            coordinator.commands.put(pb.WatchResponse(begin=begin_at(4, fresh=True)))
            until(coordinator.heartbeats, lambda beat: "to initialize it" in beat.waiting_for)
            ready = coordinator.ready.get(timeout=WAIT_S)
            assert (ready.generation, ready.initialized, ready.error) == (4, False, "")
            client.initialize(
                fence_of(client, 4), counting(PLAN), AUTHORITY.grant_initialize("worker-1", 4)
            )
        over(coordinator, future)


def test_an_order_that_comes_again_is_answered_again(coordinator: FakeCoordinator) -> None:
    with shard(coordinator) as future, worker(coordinator) as client:
        trained(client)
        coordinator.commands.put(pb.WatchResponse(begin=coordinator.begin))
        ready = coordinator.ready.get(timeout=WAIT_S)
        assert (ready.generation, ready.version, ready.initialized) == (1, 1, True)
        assert [(i.start, i.stop) for i in ready.applied[0].applied] == [(0, 5)]
        over(coordinator, future)


def test_a_checkpoint_that_is_not_good_is_said_and_the_shard_stays(
    coordinator: FakeCoordinator,
) -> None:
    with shard(coordinator) as future, worker(coordinator) as client:
        trained(client)
        for path, why in (("checkpoints/none", "none has no"), ("../elsewhere", "names is '..'")):
            coordinator.commands.put(pb.WatchResponse(begin=begin_at(2, restore=path)))
            ready = coordinator.ready.get(timeout=WAIT_S)
            assert ready.generation == 2
            assert why in ready.error
        assert push(client, B) == "applied", "it has not begun"
        coordinator.commands.put(pb.WatchResponse(begin=begin_at(3, keep=True)))
        assert coordinator.ready.get(timeout=WAIT_S).version == 2
        over(coordinator, future)


def test_an_order_without_a_source_is_no_order(coordinator: FakeCoordinator) -> None:
    with shard(coordinator) as future, worker(coordinator) as client:
        trained(client)
        coordinator.commands.put(pb.WatchResponse(begin=begin_at(2)))
        assert "names no source" in coordinator.ready.get(timeout=WAIT_S).error
        assert push(client, B) == "applied"
        over(coordinator, future)


def test_a_revocation_is_obeyed_and_said_at_once(coordinator: FakeCoordinator) -> None:
    coordinator.registration.heartbeat_s = 1000
    with shard(coordinator) as future, worker(coordinator) as client:
        assert until(coordinator.heartbeats, lambda beat: beat.generation == 1).revoked == 0
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        coordinator.commands.put(
            pb.WatchResponse(revocation=pb.Revocation(number=7, worker="worker-3"))
        )
        beat = coordinator.heartbeats.get(timeout=WAIT_S)
        assert (beat.generation, beat.revoked) == (1, 7)
        with pytest.raises(StaleGeneration, match="worker-3 was taken for gone"):
            push(client, A, name="worker-3")
        assert push(client, A, name="worker-4") == "applied"
        over(coordinator, future)


def test_a_shard_that_cannot_remember_a_revocation_leaves(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.core.fence.MAX_REVOKED", 0)
    with shard(coordinator) as future:
        coordinator.commands.put(
            pb.WatchResponse(revocation=pb.Revocation(number=1, worker="worker-3"))
        )
        with pytest.raises(Exception, match="0 workers were revoked in generation 1 already"):
            future.result(WAIT_S)
    assert not any(
        coordinator.heartbeats.get_nowait().revoked for _ in range(coordinator.heartbeats.qsize())
    )


# -- a coordinator that was started again ----------------------------------------------------


def test_a_shard_goes_on_serving_and_is_found_by_a_new_coordinator(tmp_path: Path) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(ExitStack())
        first = old.enter_context(running(FakeCoordinator(tmp_path, PLAN)))
        future = stack.enter_context(shard(first))
        client = stack.enter_context(worker(first))
        trained(client)
        old.close()
        assert push(client, B) == "applied"
        second = FakeCoordinator(tmp_path, PLAN)
        second.begin = begin_at(2, keep=True)
        stack.enter_context(running(second, first.address))
        assert second.registered.get(timeout=WAIT_S).incarnation in first.known
        watched = until(second.watches, lambda watch: watch.incarnation in second.known)
        assert (watched.generation, watched.initialized, watched.version) == (1, True, 2)
        ready = second.ready.get(timeout=WAIT_S)
        assert (ready.generation, ready.version, ready.initialized) == (2, 2, True)
        with pytest.raises(StaleGeneration, match="is of generation 1; shard 0 is in 2"):
            push(client, A)
        assert push(client, A, generation=2) == "already_applied"
        over(second, future)


def test_a_coordinator_that_reads_its_job_is_awaited(coordinator: FakeCoordinator) -> None:
    """Before a shard is registered, and after, where the coordinator was started again."""
    coordinator.failures.extend([Preparing("the job to be read")] * 3)
    with shard(coordinator) as future:
        assert coordinator.ready.get(timeout=WAIT_S).generation == 1
        coordinator.failures.extend([Preparing("the job to be read")] * 5)
        until(coordinator.heartbeats, lambda _beat: not coordinator.failures)
        over(coordinator, future)


def test_a_shard_that_was_forgotten_registers_again(coordinator: FakeCoordinator) -> None:
    with shard(coordinator) as future, worker(coordinator):
        coordinator.watches.get(timeout=WAIT_S)
        coordinator.known.clear()
        coordinator.registered.get(timeout=WAIT_S)
        # Its old command stream is of no use any more.
        watched = until(coordinator.watches, lambda watch: watch.incarnation in coordinator.known)
        assert watched.generation == 1
        over(coordinator, future)


def test_a_stream_that_is_refused_has_the_shard_register_again(
    coordinator: FakeCoordinator,
) -> None:
    coordinator.registration.heartbeat_s = 1000
    with shard(coordinator) as future, worker(coordinator):
        coordinator.heartbeats.get(timeout=WAIT_S)
        coordinator.known.clear()
        coordinator.commands.put(None)
        coordinator.registered.get(timeout=WAIT_S)
        over(coordinator, future)


def another_run(coordinator: FakeCoordinator) -> None:
    coordinator.registration.run_id = "run-2"


def another_plan(coordinator: FakeCoordinator) -> None:
    coordinator.registration.plan = plan_of(size=32).to_json()


def another_optimizer(coordinator: FakeCoordinator) -> None:
    """The run was resumed with another learning rate."""
    sgd = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
    coordinator.registration.optimizer = json.dumps(sgd).encode()


@pytest.mark.parametrize("other", [another_run, another_plan, another_optimizer])
def test_a_coordinator_of_another_job_is_left(
    coordinator: FakeCoordinator, other: Callable[[FakeCoordinator], None]
) -> None:
    with shard(coordinator) as future, worker(coordinator):
        other(coordinator)
        coordinator.known.clear()
        with pytest.raises(JobMismatch, match="has another job"):
            future.result(WAIT_S)


@pytest.mark.parametrize("where", ["stream", "heartbeats", "report"])
def test_a_coordinator_that_fails_is_tried_again_and_nothing_is_lost(
    coordinator: FakeCoordinator, where: str
) -> None:
    failure = RemoteFailure("an unforeseen error")
    if where == "report":
        coordinator.registration.heartbeat_s = 1000
    with shard(coordinator) as future, worker(coordinator) as client:
        trained(client)
        coordinator.begin = begin_at(2, keep=True)
        if where != "stream":
            coordinator.failures.extend([failure] * 5)
        if where == "heartbeats":
            until(coordinator.heartbeats, lambda _: not coordinator.failures)
        coordinator.commands.put(failure if where == "stream" else None)
        ready = coordinator.ready.get(timeout=WAIT_S)
        assert (ready.generation, ready.version, ready.initialized) == (2, 1, True)
        until(coordinator.heartbeats, lambda beat: beat.generation == 2)
        assert not coordinator.failures
        assert push(client, B, generation=2) == "applied"
        over(coordinator, future)


# -- a place that is another's ---------------------------------------------------------------


def test_a_shard_that_was_replaced_leaves(coordinator: FakeCoordinator) -> None:
    with shard(coordinator) as future, worker(coordinator):
        coordinator.replaced = True
        with pytest.raises(StaleGeneration, match="was replaced as shard 0 and leaves"):
            future.result(WAIT_S)


def test_a_shard_whose_place_is_taken_when_it_comes_back_leaves(
    coordinator: FakeCoordinator,
) -> None:
    with shard(coordinator) as future, worker(coordinator):
        coordinator.taken = True
        coordinator.known.clear()
        with pytest.raises(StaleGeneration, match="was replaced as shard 0 and leaves"):
            future.result(WAIT_S)


def test_a_place_that_becomes_free_is_taken(coordinator: FakeCoordinator) -> None:
    coordinator.taken = True
    with shard(coordinator) as future:
        coordinator.refused.get(timeout=WAIT_S)
        coordinator.taken = False
        coordinator.ready.get(timeout=WAIT_S)
        over(coordinator, future)


# -- leaving ---------------------------------------------------------------------------------


def test_a_shard_that_is_told_to_stop_serves_until_it_is_saved(
    coordinator: FakeCoordinator,
) -> None:
    ending = Ending()
    with shard(coordinator, ending) as future, worker(coordinator) as client:
        trained(client)
        ending.stop()
        until(coordinator.heartbeats, lambda beat: beat.leaving)
        assert push(client, B) == "applied"
        assert not future.done()
        coordinator.saved = True
        assert future.exception(WAIT_S) is None


def test_a_shard_that_is_not_saved_leaves_in_the_end(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.process.ending.STAY_S", 0.05)
    ending = Ending()
    with shard(coordinator, ending) as future, worker(coordinator) as client:
        trained(client)
        coordinator.silent = True
        with structlog.testing.capture_logs() as logs:
            ending.stop()
            assert future.exception(WAIT_S) is None
        assert [entry for entry in logs if "without its state saved" in entry["event"]]


def test_a_shard_stays_while_the_coordinator_saves_the_whole_job() -> None:
    """All were told to leave at once: what is leased is finished first, and a large checkpoint
    takes longer than a shard stays that leaves alone."""
    clock = ManualClock()
    words = [True] * 20

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            if words:
                words.pop()
                clock.advance(timeout / 2)
                ending.stay()
            else:
                clock.advance(timeout)
            return False

    class Paced(Threads):
        now = staticmethod(clock.now)

    ending = Ending(Paced())
    ending.event = Waited()
    ending.save_first(lambda: None)
    ending.stop()
    ending.wait()
    assert clock.now() == pytest.approx(20 / 2 * ending_module.STAY_S + ending_module.STAY_S)


def test_the_coordinator_says_when_it_saves_the_whole_job(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays = threading.Semaphore(0)
    stay = Ending.stay

    def noting(ending: Ending) -> None:
        stay(ending)
        stays.release()

    monkeypatch.setattr(Ending, "stay", noting)
    coordinator.saving = True
    ending = Ending()
    with shard(coordinator, ending) as future, worker(coordinator) as client:
        trained(client)
        ending.stop()
        # Once by itself, and whenever it hears so.
        assert all(stays.acquire(timeout=WAIT_S) for _ in range(3))
        coordinator.saved = True
        assert future.exception(WAIT_S) is None


def test_told_twice_a_shard_leaves_at_once(coordinator: FakeCoordinator) -> None:
    ending = Ending()
    with shard(coordinator, ending) as future, worker(coordinator) as client:
        trained(client)
        ending.stop()
        until(coordinator.heartbeats, lambda beat: beat.leaving)
        ending.stop()
        assert future.exception(WAIT_S) is None
    assert not coordinator.saved


def test_a_shard_that_leaves_by_itself_keeps_its_status_when_it_is_told_to_stop_as_well() -> None:
    ending = Ending()
    ending.end(status=DONE)
    ending.stop()
    assert (ending.status, ending.error) == (DONE, None)


def test_a_shard_that_holds_nothing_leaves_at_once(coordinator: FakeCoordinator) -> None:
    ending = Ending()
    with shard(coordinator, ending) as future, worker(coordinator):
        ending.stop()
        assert future.exception(WAIT_S) is None
