"""A worker without TensorFlow, real shards, and losses while it works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.core.requests import PullRequest, Values
from pserver.engine.engine import ShardEngine
from pserver.server.server import ShardServer
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Begin, Decision, Revocation
from psrpc.core.encoding import plain
from psrpc.core.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.pserver.shards import AUTHORITY, Sink, fence_of, leased, session_of
from tests.worker.loop.fixtures import ARENA, PLAN, WITNESSES, Leases, at_work, attempt, task, until
from tests.worker.scripted_coordinator import FINISHED, ScriptedCoordinator
from tests.worker.shards import SGD, Shards
from worker.loop import router
from worker.loop.session import WorkerSession
from worker.protocol.done import Stopped

both = pytest.mark.parametrize("shm", [False, True])


@both
def test_batches_are_done_once_without_tensorflow(shm: bool) -> None:
    with at_work(lambda _c, _s: [task(0, 1, 2), task(3)], shm=shm) as running:
        running.check(0, 1, 2, 3)
        # Told of the first pull and of each batch, after the initialization, which is no exchange.
        assert running.source.waits == [False, *[True, False] * 5]
        assert set(running.coordinator.reports()) == {1, 2, 3, 4}
        (left,) = running.coordinator.of(pb.LeaveWorkerRequest)
        assert (left.reason, left.fatal) == ("the job is done", False)
        # Phases of a batch: it is read, its rows are fetched, it is computed and exchanged.
        position = running.coordinator.of(pb.HeartbeatWorkerRequest)[-1].position
        assert position.position > 4 * 4
        assert position.median_step_s > 0


def two_then(event: Callable[[ScriptedCoordinator, Shards], None]) -> Leases:
    """Batches 0 and 1; when all shards have them, what ``event`` does; then batch 2 until it is
    reported."""

    def leases(coordinator: ScriptedCoordinator, shards: Shards) -> list[Any]:
        def happen() -> pb.Lease:
            # The request for this came while the worker was at batch 1.
            until(lambda: [engine.report().version for engine in shards.engines] == [2, 2])
            event(coordinator, shards)
            return task(2)

        def again() -> pb.Lease:
            if 3 in coordinator.reports():
                return FINISHED
            coordinator.leases.append(again)
            return task(2)

        return [task(0, 1), happen, again]

    return leases


@both
@pytest.mark.slow  # it pauses before it joins anew
def test_a_worker_that_was_revoked_goes_on_under_another_name(shm: bool) -> None:
    def revoke(coordinator: ScriptedCoordinator, shards: Shards) -> None:
        # Batch 2 reaches one shard before the other hears of it.
        shards.engines[1].commands.revoke(Revocation(1, "worker-0"))
        coordinator.worker = "worker-1"

    with at_work(two_then(revoke), shm=shm) as running:
        running.check(0, 1, 2)
        assert len(running.coordinator.of(pb.RegisterWorkerRequest)) == 2
        assert running.coordinator.of(pb.LeaveWorkerRequest)[0].session == session_of("worker-1")
        assert running.shards.engines[0].report().counters.already_applied >= 1


@both
@pytest.mark.slow  # it pauses before it joins anew
def test_a_worker_that_waits_for_a_dead_shard_learns_of_the_replacement(shm: bool) -> None:
    def die(_coordinator: ScriptedCoordinator, shards: Shards) -> None:
        shards.servers[1].stop(0)

    with at_work(two_then(die), shm=shm) as running, ShardServer(1, "127.0.0.1:0") as server:
        coordinator, (first, second) = running.coordinator, running.shards.engines
        until(lambda: "unreachable" in running.standing.waits.reason())
        until(lambda: first.report().version == 3)  # the batch has reached one shard only
        server.open(
            ShardEngine(
                replace(second.identity, incarnation=201, generation=2),
                PLAN,
                NumpyEngine(SGD, PLAN, 1),
                Sink(),
            )
        )
        restore(server.port, 0, 1)
        assert first.commands.begin(Begin(2, 1, keep=True, keys=AUTHORITY.keys)) is not None
        replaced = pb.GetClusterResponse()
        replaced.CopyFrom(coordinator.cluster)
        replaced.generation = 2
        replaced.shards[1].address = f"127.0.0.1:{server.port}"
        replaced.shards[1].incarnation = 201
        running.shards.cluster = coordinator.cluster = replaced
        coordinator.heartbeat = pb.HeartbeatWorkerResponse(generation=2)
        running.check(0, 1, 2)


def restore(port: int, *batches: int) -> None:
    """Gives shard 1 the values after ``batches``, and has it know that."""
    values = np.zeros(2 * WITNESSES, np.float32)
    values[WITNESSES:][list(batches)] = 1
    with ShardClient(f"127.0.0.1:{port}", 201, PLAN, 1) as client:
        fence = fence_of(client, 2, worker="worker-9")
        grant = AUTHORITY.grant_initialize("worker-9", 2)
        client.initialize(fence, {ARENA.name: values}, grant)
        for batch in batches:
            skipped = leased("worker-9", BatchId(0, batch, 1), 9, 0, None, generation=2)
            client.push(fence, skipped)


@both
@pytest.mark.slow  # it pauses before it joins anew
def test_a_worker_leaves_a_shard_that_stands_still(shm: bool) -> None:
    asked, frozen = threading.Event(), threading.Event()

    def freeze(_coordinator: ScriptedCoordinator, _shards: Shards) -> None:
        asked.set()
        assert frozen.wait(30)

    with at_work(two_then(freeze), shm=shm) as running:
        coordinator, (first, second) = running.coordinator, running.shards.engines
        assert asked.wait(30)
        with second._changed:  # nothing passes its lock
            frozen.set()
            until(lambda: first.report().version == 3)
            coordinator.cluster.generation = 2
            coordinator.heartbeat = pb.HeartbeatWorkerResponse(generation=2)
            # Its exchange would have lasted a minute.
            coordinator.wait_for(pb.GetClusterRequest, 2)
            for engine in (first, second):
                assert (
                    engine.commands.begin(Begin(2, 1, keep=True, keys=AUTHORITY.keys)) is not None
                )
        running.check(0, 1, 2)


def test_a_step_under_way_is_finished_and_reported() -> None:
    with at_work(lambda _c, _s: [task(0, 1, 2)], shm=True, stop_at=1) as running:
        running.check(0, 1)
        assert set(running.coordinator.reports()) == {1, 2}
        (left,) = running.coordinator.of(pb.LeaveWorkerRequest)
        assert left.reason == "told to stop"


def test_a_micro_batch_under_way_is_committed() -> None:
    def leases(_coordinator: ScriptedCoordinator, _shards: Shards) -> list[Any]:
        return [pb.Lease(round=pb.RoundWork(round=0, attempt=attempt(0)))]

    with at_work(leases, "sync", shm=True, stop_at=0) as running:
        running.check()
        (commit,) = running.coordinator.of(pb.CommitBatchRequest)
        assert commit.report.attempt == 1
        assert [engine.report().staged_now for engine in running.shards.engines] == [1, 1]


class Pulls:
    """Counts the pulls of round 1 that reach each shard."""

    def __init__(self, engines: Sequence[ShardEngine], monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = dict.fromkeys(engines, 0)
        for engine in engines:
            monkeypatch.setattr(engine, "pull", partial(self._pull, engine, engine.pull))

    def _pull(
        self, engine: ShardEngine, pull: Callable[..., Values], request: PullRequest, *args: Any
    ) -> Values:
        if request.source == 1:
            self.begun[engine] += 1
        return pull(request, *args)


@both
def test_the_next_round_comes_while_its_decision_is_awaited(
    shm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls: list[Pulls] = []

    def leases(_coordinator: ScriptedCoordinator, shards: Shards) -> list[Any]:
        pulls.append(Pulls(shards.engines, monkeypatch))

        def decided() -> pb.Lease:
            until(lambda: all(pulls[0].begun.values()))
            for engine in shards.engines:
                engine.commands.decide(Decision(1, 0, (Attempt(BatchId(0, 0, 1), 1),)))
            # Without the decision a second pull would not be late either.
            return pb.Lease(round=pb.RoundWork(round=1, attempt=attempt(1)))

        first = pb.RoundWork(round=0, attempt=attempt(0), pull_next=True)
        return [pb.Lease(round=first), decided]

    with at_work(leases, "sync", shm=shm) as running:
        running.check(0)
        assert list(pulls[0].begun.values()) == [1, 1]
        assert [engine.report().staged_now for engine in running.shards.engines] == [1, 1]
        commits = running.coordinator.of(pb.CommitBatchRequest)
        assert [commit.round for commit in commits] == [0, 1]


def two_ahead(answer: Callable[[Shards], pb.Lease]) -> Leases:
    """Batch 0, and batch 1 of its round ahead; ``answer`` is that to the first commit."""

    def leases(_coordinator: ScriptedCoordinator, shards: Shards) -> list[Any]:
        ahead = pb.RoundWork(round=0, attempt=attempt(0), ahead=attempt(1))
        return [pb.Lease(round=ahead), lambda: answer(shards)]

    return leases


TWO = Policy(mode="sync", replicas=2)


@both
def test_a_micro_batch_that_is_leased_ahead_is_computed_while_the_commit_is_under_way(
    shm: bool,
) -> None:
    computed = {0: threading.Event(), 1: threading.Event()}

    def answer(shards: Shards) -> pb.Lease:
        assert computed[1].wait(30)
        assert [engine.report().staged_now for engine in shards.engines] == [1, 1]
        return pb.Lease(round=pb.RoundWork(round=0, attempt=attempt(1)))

    def during(batch: int) -> None:
        computed[batch].set()

    with at_work(two_ahead(answer), shm=shm, policy=TWO, during=during) as running:
        running.check()
        assert [engine.report().staged_now for engine in running.shards.engines] == [2, 2]
        commits = running.coordinator.of(pb.CommitBatchRequest)
        assert [commit.report.attempt for commit in commits] == [1, 2]


def test_a_stop_while_a_micro_batch_is_computed_ahead_lets_the_commit_be_answered() -> None:
    answered = threading.Event()

    def answer(_shards: Shards) -> pb.Lease:
        answered.set()
        return pb.Lease(round=pb.RoundWork(round=0, attempt=attempt(1)))

    with at_work(two_ahead(answer), shm=True, policy=TWO, stop_at=0) as running:
        running.check()
        assert answered.is_set()
        (left,) = running.coordinator.of(pb.LeaveWorkerRequest)
        assert left.reason == "told to stop"
        assert [engine.report().staged_now for engine in running.shards.engines] == [1, 1]


def test_a_worker_that_pulled_too_soon_goes_on_with_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "SOON_S", 0.01)

    def leases(_coordinator: ScriptedCoordinator, _shards: Shards) -> list[Any]:
        works = [pb.RoundWork(round=0, attempt=attempt(i), pull_next=True) for i in (0, 1)]
        return [pb.Lease(round=work) for work in works]

    with at_work(leases, shm=True, policy=Policy(mode="sync", replicas=2)) as running:
        running.check()
        assert [engine.report().staged_now for engine in running.shards.engines] == [2, 2]
        # Silence would have made the coordinator look for a broken route.
        beats = running.coordinator.of(pb.HeartbeatWorkerRequest)
        assert not any(beat.unreachable for beat in beats)


@both
def test_a_stop_ends_the_wait_for_a_round(shm: bool) -> None:
    asked = threading.Event()

    def leases(_coordinator: ScriptedCoordinator, _shards: Shards) -> list[Any]:
        def never_decided() -> pb.Lease:
            asked.set()
            return pb.Lease(round=pb.RoundWork(round=1, attempt=attempt(0)))

        return [never_decided]

    with at_work(leases, "sync", shm=shm) as running:
        assert asked.wait(30)
        until(lambda: "shard 1" in running.standing.waits.reason())
        running.standing.stop()
        running.check()
        (left,) = running.coordinator.of(pb.LeaveWorkerRequest)
        assert left.reason == "told to stop"


@pytest.mark.slow
@both
def test_a_stop_ends_the_wait_for_a_shard(shm: bool) -> None:
    def leases(_coordinator: ScriptedCoordinator, shards: Shards) -> list[Any]:
        def die() -> pb.Lease:
            shards.servers[1].stop(0)
            return task(0)

        return [die]

    with at_work(leases, shm=shm) as running:
        until(lambda: "unreachable" in running.standing.waits.reason())
        running.standing.stop()
        assert isinstance(running.ended.exception(30), Stopped)
        assert running.coordinator.of(pb.LeaveWorkerRequest)


@pytest.mark.slow
def test_heartbeats_say_where_the_time_has_gone() -> None:
    with at_work(lambda _c, _s: [task(0, 1, 2), task(3)], shm=False) as running:
        running.check(0, 1, 2, 3)
        # The last one goes with the farewell.
        times = running.coordinator.of(pb.HeartbeatWorkerRequest)[-1].times
        assert times.network > 0
        assert times.apply > 0
        assert times.compute > 0
        assert times.barrier > 0


@pytest.mark.slow
def test_a_batch_refused_as_too_stale_is_reported_and_repeated_there() -> None:
    addresses: list[str] = []

    def push_another(shard: int, version: int) -> None:
        """Batch 9, by another worker, which has that version of the shard."""
        one = np.zeros(WITNESSES, np.float32)
        one[9] = -2
        with ShardClient(addresses[shard], 100 + shard, PLAN, shard) as client:
            push = leased("worker-9", BatchId(0, 9, 1), 99, version, {ARENA.name: plain(one)})
            client.push(fence_of(client, worker="worker-9"), push)

    def leases(coordinator: ScriptedCoordinator, shards: Shards) -> list[Any]:
        addresses.extend(at.address for at in shards.cluster.shards)

        def again() -> pb.Lease:
            reports = coordinator.reports()
            if 1 not in reports:
                coordinator.leases.append(again)
                return pb.Lease(wait=pb.Wait(reason="the first"))
            assert reports[1].too_stale
            assert reports[1].staleness == 1
            push_another(0, 1)
            return pb.Lease(train=pb.TrainTask(batches=[attempt_again], fresh=True))

        return [task(0), again]

    attempt_again = types.Attempt(batch=attempt(0).batch, attempt=2)
    once = iter([lambda: push_another(1, 0)])

    with at_work(
        leases,
        shm=True,
        policy=Policy(max_staleness=0),
        during=lambda _batch: next(once, lambda: None)(),
    ) as running:
        running.check(0, 9)
        second = running.coordinator.reports()[2]
        assert (second.too_stale, second.staleness) == (False, 0)
        counters = [engine.report().counters for engine in running.shards.engines]
        assert [c.too_stale for c in counters] == [0, 1]
        assert [c.already_applied for c in counters] == [1, 0]


@pytest.mark.slow
def test_a_slow_worker_pauses_after_each_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(WorkerSession, "pause", lambda _standing, seconds: pauses.append(seconds))
    with at_work(lambda _c, _s: [task(0, 1)], shm=True, slow_down=3.0) as running:
        running.check(0, 1)
        assert len(pauses) == 2
        computed_s = running.coordinator.of(pb.HeartbeatWorkerRequest)[-1].times.compute
        assert 0 < sum(pauses) / 2 <= computed_s


@pytest.mark.slow
def test_a_stop_ends_the_pause_of_a_slow_worker() -> None:
    # As slow as that it would not come to its end.
    with at_work(lambda _c, _s: [task(0, 1)], shm=True, stop_at=0, slow_down=1e9) as running:
        running.check()
        (left,) = running.coordinator.of(pb.LeaveWorkerRequest)
        assert left.reason == "told to stop"
