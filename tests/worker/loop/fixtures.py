"""A worker without TensorFlow at real shards, with a coordinator by script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from coordinator.client.client import CoordinatorClient
from pserver.client.client import ShardClient
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import plain
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from psrpc.core.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.pserver.shards import fence_of
from tests.worker.fakes import FakeResult, FakeSource
from tests.worker.scripted_coordinator import (
    INITIALIZE,
    ScriptedCoordinator,
    attempt_at,
    serve_script,
    train_task,
)
from tests.worker.shards import Shards, serve_shards
from worker.data.source import Array
from worker.loop.performer import Performer
from worker.loop.session import WorkerSession
from worker.loop.step_times import StepTimes
from worker.protocol.done import Stopped

WITNESSES = 32
"""Elements on each shard: one for each batch, which it moves from 0 to 1."""


def plan_of(shards: int) -> Plan:
    """The elements of two shards, on one or two."""
    return make_plan([VariableSpec("w", (2 * WITNESSES,), "float32", "trainable")], shards, "cut")


PLAN = plan_of(2)
(ARENA,) = PLAN.arenas
TICK_S = 0.001
Leases = Callable[[ScriptedCoordinator, Shards], Iterable[Any]]
"""What the coordinator hands out, as ScriptedCoordinator takes it."""


class Source(FakeSource):
    """Gradients that say which batch they are of. A signal comes at that of ``stop_at``."""

    def __init__(
        self,
        standing: WorkerSession,
        stop_at: int | None,
        during: Callable[[int], object],
        summed: int,
    ) -> None:
        """``during`` is called with each batch while it is computed; ``summed`` micro-batches of a
        round are pushed as a sum."""
        self._summed = summed
        self._standing = standing
        self._stop_at = stop_at
        self._during = during
        self.waits: list[bool] = []

    def prepare(self, plan: Plan, workspace: Workspace) -> None:
        self._plan = plan
        super().prepare(plan, workspace)

    def initial_values(self, _first_rows: str = "", /) -> Mapping[str, Array]:
        return {ARENA.name: np.zeros(2 * WITNESSES, np.float32)}

    @property
    def exact(self) -> bool:
        return self._summed == 1

    def waiting(self, now: bool, /) -> None:
        self.waits.append(now)

    def read(self, batch: BatchId) -> int:
        return batch.first

    def gradient(self, batch: BatchId, given: int, _rows: object = None) -> FakeResult:
        if given == self._stop_at:
            self._standing.stop()
        self._during(given)
        one = np.zeros(WITNESSES, np.float32)
        one[given] = -2 * self._summed
        both = np.concatenate([one, one])
        parts = np.split(both, self._plan.shards)
        return FakeResult(tuple({ARENA.name: plain(part)} for part in parts), loss=0.5)


def attempt(index: int) -> types.Attempt:
    return attempt_at(BatchId(0, index, 1), index + 1)


def task(*indices: int) -> pb.Lease:
    return train_task(*map(attempt, indices))


@dataclass
class Running:
    """A worker at work; ``ended`` has what its run has raised."""

    coordinator: ScriptedCoordinator
    shards: Shards
    standing: WorkerSession
    source: Source
    ended: Future[None]
    times: StepTimes

    def check(self, *batches: int) -> None:
        """Waits for the end; each of ``batches``, and no other, counted once on every shard."""
        assert isinstance(self.ended.exception(30), Stopped)
        expected = np.zeros((2, WITNESSES), np.float32)
        expected[:, batches] = 1
        cluster = self.shards.cluster
        into = {ARENA.name: np.empty(2 * WITNESSES, np.float32)}
        for shard, at in enumerate(cluster.shards):
            plan = plan_of(len(cluster.shards))
            with ShardClient(at.address, at.incarnation, plan, shard) as client:
                client.pull(fence_of(client, cluster.generation), None, into)
        np.testing.assert_array_equal(into[ARENA.name].reshape(2, WITNESSES), expected)


@contextmanager
def at_work(
    leases: Leases,
    mode: Literal["async", "sync"] = "async",
    *,
    shm: bool,
    stop_at: int | None = None,
    slow_down: float = 1.0,
    policy: Policy | None = None,
    during: Callable[[int], object] = lambda _batch: None,
    summed: int = 1,
    count: int = 2,
) -> Iterator[Running]:
    """A worker that is told to initialize the ``count`` shards, and then given ``leases``."""
    times = StepTimes()
    policy = Policy(mode="sync", replicas=summed) if summed > 1 else policy
    with (
        serve_shards(plan_of(count), mode, 1 if mode == "sync" else 0, policy) as shards,
        serve_script(shards.cluster) as coordinator,
        CoordinatorClient(coordinator.address) as client,
        WorkerSession(client, 7, connect_timeout_s=600, times=times.totals) as standing,
    ):
        coordinator.leases.extend([INITIALIZE, *leases(coordinator, shards)])
        source = Source(standing, stop_at, during, summed)
        ended: Future[None] = Future()

        def run() -> None:
            try:
                with Performer(
                    source, standing, "sha", "cpu", times, shm=shm, slow_down=slow_down
                ) as performer:
                    performer.run()
            except BaseException as error:
                ended.set_exception(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Running(coordinator, shards, standing, source, ended, times)
        finally:
            standing.stop()
            thread.join()


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(TICK_S)
