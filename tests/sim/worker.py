"""A worker: the real one, on a simulated network, with gradients of the witness."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from psrpc.core.errors import AlreadyExists, JobFailed, PsError, StaleGeneration
from tests.sim.calls import ToCoordinator, ToShard
from tests.sim.fibers import Fibers
from tests.sim.network import SHA
from tests.sim.schedule import Process, Steps
from tests.sim.shard import Shard
from tests.sim.source import Source
from worker.loop.performer import Performer
from worker.loop.routes import PROBE_S, RouteProbe
from worker.loop.session import WorkerSession
from worker.loop.step_times import StepTimes
from worker.protocol import actions as does
from worker.protocol.conduct import conduct, drive
from worker.protocol.done import Stopped

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


TICK_S = 0.05
"""How often a worker that ends looks whether its slices have ended."""


class Worker:
    """One start of a worker's process."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.process = process
        self.cluster = cluster
        self.fibers = Fibers(process)
        old = cluster.options.old_workers
        clocks = process.name not in [f"worker-{index}" for index in range(old)]
        times = StepTimes(1, self.fibers.now)
        self.standing = WorkerSession(
            ToCoordinator(cluster.network, process, self.fibers, self._answered, clocks),
            process.incarnation,
            cluster.options.patience_s,
            times.totals,
            self.fibers,
            RouteProbe(self.fibers.now, self._connects, self.fibers),
        )
        self.source = Source(self)
        self._performer = Performer(
            self.source,
            self.standing,
            SHA,
            "cpu",
            times,
            shm=False,
            prefetch_rows=cluster.options.prefetch,
            connect=partial(ToShard, self),
        )
        self._doing = "starts"
        self._slices: dict[int, Shard] = {}
        self._leaving = False
        self._told = False
        if cluster.options.hosted:
            self.standing.membership.hosts = True
            self.standing.host = self._host

    def live(self) -> Steps:
        """Takes part until the job ends; returns why it left."""
        try:
            why = yield self.fibers.run(self._work)
        except PsError as error:
            why = error
        self._end_slices()
        while self._slices:
            yield self.cluster.schedule.sleep(TICK_S)
        return why

    def terminate(self) -> None:
        """SIGTERM: it works on until its slices are saved."""
        self._told = True
        self._end_slices()
        if not self._slices:
            self.standing.stop()

    # As worker.process.hosting does, with threads.

    def _host(self, slices: Sequence[int]) -> None:
        for index in slices:
            if not self._leaving and index not in self._slices:
                self._slices[index] = self.cluster.host_slice(self.process, index, self._ended)

    def _end_slices(self) -> None:
        self._leaving = True
        for each in list(self._slices.values()):
            each.terminate()

    def _ended(self, index: int, why: object) -> None:
        del self._slices[index]
        lost = isinstance(why, AlreadyExists | StaleGeneration | JobFailed)
        if isinstance(why, PsError) and not lost:
            self.standing.fail(why)
        if self._told and not self._slices:
            self.standing.stop()

    def doing(self) -> str:
        membership = self.standing.membership
        return (
            f"{membership.worker} {self._doing} in generation {membership.generation}, "
            f"{self.standing.waits.reason() or 'waits for nothing'}"
        )

    def _answered(self, method: str, answer: Any) -> None:
        if method in ("LeaseWork", "CommitBatch"):
            self.cluster.invariants.check_lease(self, answer.lease)

    def _connects(self, address: str) -> bool:
        """Whether a connection can be made; the kernel of a process that stands still makes it."""
        network = self.cluster.network
        server = network.server_at(address)
        cut = server is not None and network.parts(self.process, server.process)
        if cut or network.faults.strikes("request lost in silence"):
            self.fibers.sleep(PROBE_S)
            return False
        self.fibers.sleep(network.latency(self.process))
        return server is not None

    def _work(self) -> PsError | Stopped:
        with self.standing, self._performer:
            try:
                drive(conduct(sums=self.source.sums), self._perform)
            except (PsError, Stopped) as end:
                return end
        raise AssertionError("a worker ends by raising")

    def _perform(self, action: does.Action) -> object:
        """Carries an action out, and looks at what it has come to."""
        self._doing = type(action).__name__
        invariants, source = self.cluster.invariants, self.source
        if isinstance(action, does.Push | does.PushPull | does.PushNext):
            for shard in range(self.cluster.options.shards):
                part = self.cluster.witness.shard_part(source.parameters, shard)
                invariants.policies.check_fresh(self.process, action.attempt, part)
        answer = self._performer.perform(action)
        match action:
            case does.Join():
                generation = self.standing.membership.generation
                invariants.check_worker(self, generation, None)
            case does.Pull():
                source.pulled = source.versions
                invariants.check_pull(self, source.parameters, action.round)
            case does.PushPull():
                invariants.check_pull(self, source.parameters, None)
            case does.PushNext():
                source.pulled = source.versions
                invariants.check_pull(self, source.parameters, action.round)
                self.cluster.counts["rounds decided ahead"] += 1
            case does.TakeCommit():
                self.cluster.counts["computed ahead"] += 1
        return answer
