"""A worker: the real one, on a simulated network, with gradients of the witness."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from pserver.process.hosted import HostedSlice
from psrpc.core.errors import PsError
from psrpc.options.settings import WorkerOptions
from tests.sim.calls import ToCoordinator, ToShard
from tests.sim.fibers import Fibers
from tests.sim.network import COORDINATOR, SHA
from tests.sim.schedule import Process, Steps
from tests.sim.shard import Shard, serve_slice
from tests.sim.source import Source
from worker.loop.performer import Performer
from worker.loop.routes import PROBE_S, RouteProbe
from worker.loop.session import WorkerSession
from worker.loop.step_times import StepTimes
from worker.process.hosting import SliceHosting
from worker.process.run import HOST_LEAVE_S, LEAVE_S
from worker.protocol import actions as does
from worker.protocol.conduct import conduct, drive
from worker.protocol.done import Stopped

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


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
        self.slices: list[Shard] = []
        """Those that it hosts now."""
        self.hosting: SliceHosting | None = None
        if cluster.hosted:
            self.hosting = SliceHosting(
                self.standing,
                WorkerOptions(
                    coordinator=COORDINATOR, connect_timeout_s=cluster.options.patience_s
                ),
                process.incarnation,
                partial(HostedSlice, threads=self.fibers, serves=partial(serve_slice, self)),
                partial(ToShard, self),
            )
        self._performer = Performer(
            self.source,
            self.standing,
            SHA,
            "cpu",
            times,
            shm=False,
            prefetch_rows=cluster.options.prefetch,
            connect=self.hosting.connect if self.hosting else partial(ToShard, self),
        )
        self._doing = "starts"

    def live(self) -> Steps:
        """Takes part until the job ends; returns why it left."""
        try:
            why = yield self.fibers.run(self._work)
        except PsError as error:
            why = error
        return why

    def terminate(self) -> None:
        """SIGTERM."""
        if self.hosting is None:
            self.standing.stop()
        else:
            self.fibers.spawn(partial(self._stop, self.hosting), lambda _result: None)

    def _stop(self, hosting: SliceHosting) -> None:
        leave_s = LEAVE_S if hosting.leave() == 0 else HOST_LEAVE_S
        self.standing.stop()
        self.fibers.sleep(leave_s)
        self.standing.leave("told to stop")
        self.cluster.process_ended(self.process, "told to stop")

    def doing(self) -> str:
        membership = self.standing.membership
        slices = (f"; hosts shard {slice_.index}, {slice_.doing()}" for slice_ in self.slices)
        return (
            f"{membership.worker} {self._doing} in generation {membership.generation}, "
            f"{self.standing.waits.reason() or 'waits for nothing'}{''.join(slices)}"
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
        with self.standing, self.hosting or nullcontext(), self._performer:
            if self.hosting is not None:
                self.hosting.offer()
            try:
                source = self.source
                drive(conduct(sums=source.sums, exact=source.exact), self._perform)
            except (PsError, Stopped) as end:
                return end
        raise AssertionError("a worker ends by raising")

    def _perform(self, action: does.Action) -> object:
        """Carries an action out, and looks at what it has come to."""
        self._doing = type(action).__name__
        invariants, source = self.cluster.invariants, self.source
        if isinstance(action, does.Push | does.PushPull | does.PushNext):
            for shard in source.places.dense:
                part = source.places.part(source.parameters, shard)
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
