"""One start of a coordinator: the real cores, store and messages, and a disk in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from coordinator.checkpoints.choice import Chosen
from coordinator.checkpoints.disk import DiskChoice, DiskWork, WrittenManifest
from coordinator.core.run import RestoredCheckpoint, Run
from coordinator.core.work import Train, Wait, Work
from coordinator.job.engine import POLL_S, Caller, Engine
from coordinator.job.job_run import JobRun
from coordinator.process.settling import settle
from coordinator.records.run_directory import RunDirectory
from coordinator.records.store import Store
from coordinator.rpc.messages import write_lease
from coordinator.rpc.servicer import Servicer
from coordinator.training.streams import Stream
from psrpc.core.errors import NotReady, PsError
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.shard_reports import from_held
from tests.sim.coordinator import NoCurves, ServeOptions, SimulatedBell
from tests.sim.schedule import Process, Steps

if TYPE_CHECKING:
    from tests.sim_scale.cluster import Cluster

TICK_S = 0.5

PER_MACHINE = 8
"""Processes of one address."""

LOOK_S = 0.05
"""How often commands are handed out, and parked calls look for news."""

DISK_S = 0.3

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Context:
    """The context of a call: its caller's address and the absence of certificates."""

    incarnation: int

    def peer(self) -> str:
        """Returns the caller's address, in gRPC's form."""
        machine = self.incarnation // PER_MACHINE
        return f"ipv4:10.0.{machine // 250}.{machine % 250}:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        """Returns nothing: there are no certificates."""
        return {}


class _Disk(DiskWork):
    """Remembers which checkpoints are committed; they have no files."""

    def __init__(self, process: Process, run: Run, cluster: Cluster) -> None:
        super().__init__(run)
        self._process = process
        self._cluster = cluster

    def begin(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        def end() -> None:
            done(work())
            self.over()

        self._process.schedule.after(DISK_S, self._process, end)

    def prepare(self, order: Any) -> None:
        pass

    def discard(self, order: Any) -> None:
        pass

    def commit(
        self, taken: Any, generation: int, scores: Any, in_use: Any, done: Callable[[Any], None]
    ) -> None:
        def commit() -> WrittenManifest:
            order = taken.order
            self._cluster.committed.append((order.name, order.global_step, generation))
            return WrittenManifest(taken, generation)

        self.start("commit", commit, done)

    def retain(self, scores: Any, in_use: Any, done: Callable[[Any], None]) -> None:
        self.start("retain", tuple, done)

    def choose(self, refused: Mapping[str, str], done: Callable[[DiskChoice], None]) -> None:
        def choose() -> DiskChoice:
            if not self._cluster.committed:
                return DiskChoice(None, "there is none")
            name, step, generation = self._cluster.committed[-1]
            self._cluster.counts["checkpoints chosen"] += 1
            chosen = Chosen(RestoredCheckpoint(name, step), self._run.run_id, generation, ())
            return DiskChoice(chosen, seen=True)

        self.start("choice", choose, done)


class Coordinator:
    """Answers calls until its process dies."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.process = process
        self._cluster = cluster
        self._schedule = cluster.schedule
        self._bell = SimulatedBell()
        self._parked: list[tuple[float, Callable[[bool], bool]]] = []
        self._streams: list[tuple[Stream, Callable[[Any], None]]] = []
        self.job_run: JobRun | None = None

    def live(self) -> Steps:
        """Serves the run, as with --resume auto."""
        cluster = self._cluster
        store = Store(cluster.run_dir / "ledger.sqlite")
        store.open()
        self.process.at_death(store.close)
        run = settle(
            ServeOptions(cluster.options.shards, Path("jobs/crowd.py")),
            cluster.description,
            cluster.plan,
            RunDirectory(cluster.run_dir, resume=False),
            store,
        )
        disk = _Disk(self.process, run, cluster)
        self.job_run = job_run = JobRun(run, store, self._schedule.clock, disk, NoCurves())
        job_run.bell = cast("Any", self._bell)
        self.engine = Engine(job_run, store)
        self._servicer = Servicer(self.engine)
        self.process.spawn(self._look())
        while True:
            job_run.tick()
            yield self._schedule.sleep(TICK_S)

    def _look(self) -> Steps:
        while True:
            yield self._schedule.sleep(LOOK_S)
            for stream, send in self._streams:
                while (command := stream.next()) is not None:
                    send(self.engine.authority.with_keys(command))
            now = self._schedule.now()
            rung, self._bell.rung = self._bell.rung, False
            looking, self._parked = self._parked, []
            for until, look in looking:
                if not (rung or now >= until) or not look(now >= until):
                    self._parked.append((until, look))

    def watch(self, request: pb.WatchRequest, send: Callable[[Any], None]) -> None:
        """Opens a command stream, which lasts until a newer one of the shard."""
        self.streams_of(request.shard)
        stream = self.engine.shards.watch_now(request.shard, from_held(request))
        self._streams.append((stream, send))

    def streams_of(self, shard: int) -> None:
        """Ends the streams of a shard, whose connection has broken."""
        for stream, _ in self._streams:
            if stream.shard == shard:
                self.engine.shards.watch_ended(stream)
        self._streams = [item for item in self._streams if item[0].shard != shard]

    def handle(
        self, method: str, request: Any, context: Any, respond: Callable[[Any], None]
    ) -> None:
        """Carries out a call; the answer may come later."""
        if self.job_run is None:
            respond(NotReady("starting"))
            return
        try:
            match method:
                case "LeaseWork":
                    self._lease(request, context, respond)
                case "GetCluster":
                    self._get_cluster(request, context, respond)
                case _:
                    respond(_finish(getattr(self._servicer, method)(request, context)))
        except PsError as error:
            respond(error)

    def _lease(
        self, request: pb.LeaseWorkRequest, context: Any, respond: Callable[[Any], None]
    ) -> None:
        caller = self._servicer._caller(request, context, request.policy)
        reports = self._servicer._reports(caller, request.done)
        work = self.engine.lease_now(caller, reports, request.received)

        def look(late: bool) -> bool:
            try:
                found = self.engine._find(caller, request.received)
            except PsError as error:
                respond(error)
                return True
            if isinstance(found, Wait) and not late:
                return False
            self._answer(found, caller, respond)
            return True

        if isinstance(work, Wait):
            self._parked.append((self._schedule.now() + POLL_S, look))
        else:
            self._answer(work, caller, respond)

    def _answer(self, work: Work, caller: Caller, respond: Callable[[Any], None]) -> None:
        run = self.engine.run
        if isinstance(work, Train):
            self._cluster.leased(run.generation, caller.name, work.batches)
        lease = write_lease(work, caller.name, run, self.engine.authority)
        respond(pb.LeaseWorkResponse(lease=lease))

    def _get_cluster(
        self, request: pb.GetClusterRequest, context: Any, respond: Callable[[Any], None]
    ) -> None:
        name = self._servicer._worker(request.session, context)
        self.engine.job_run.members.worker_seen(name, self._schedule.now())

        def look(late: bool) -> bool:
            try:
                self.engine.cluster_now(name)
            except NotReady as error:
                if late:
                    respond(error)
                return late
            except PsError as error:
                respond(error)
                return True
            run = self.engine.run
            respond(pb.GetClusterResponse(generation=run.generation, policy=run.policy))
            return True

        if not look(False):
            self._parked.append((self._schedule.now() + POLL_S, look))


def _finish(coroutine: Any) -> Any:
    """The result of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError(f"{coroutine} waits for something")
