"""A coordinator: the real job_run, engine and store, driven call by call in simulated time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from coordinator.core.lifecycle import ENDED
from coordinator.core.run import Run
from coordinator.core.work import Round, RoundsLease, Train, Wait, Work
from coordinator.job.engine import POLL_S, Caller, Engine, pause_s
from coordinator.job.job_run import JobRun
from coordinator.process.settling import settle
from coordinator.records.curves import Curves, Gauges
from coordinator.records.run_directory import RunDirectory
from coordinator.rpc.messages import read_hold_end, write_hold, write_lease
from coordinator.rpc.servicer import Servicer
from coordinator.training.streams import Stream
from coordinator.transitions.holding import HoldEnd
from psrpc.core.commands import Ended
from psrpc.core.errors import (
    AccessDenied,
    CheckpointError,
    JobDone,
    NotReady,
    PsError,
    ResourceExhausted,
)
from psrpc.files.durable import ensure_directory
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.wire.commands import to_command
from psrpc.wire.shard_reports import from_held
from tests.sim.disk import SlowDisk, View
from tests.sim.network import COORDINATOR, RUN_DIR, Respond
from tests.sim.schedule import Process, Steps
from tests.sim.store import FaultyStore
from tests.sim.stream import Stream as Connection

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

TICK_S = 0.5


class _Context:
    """Context of a call: peer and certificate."""

    def peer(self) -> str:
        """All workers of a simulated cluster are on one machine."""
        return "ipv4:127.0.0.1:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        """They have no certificates."""
        return {}


CONTEXT = _Context()


class NoCurves(Curves):
    """Curves that are not recorded."""

    def __init__(self) -> None:
        super().__init__(RUN_DIR / "tensorboard")

    def step(self, step: int, loss: float, staleness: float) -> None:
        """See :class:`Curves`."""

    def flush(self, gauges: Gauges) -> None:
        """See :class:`Curves`."""

    def epoch(self, values: Mapping[str, float], step: int) -> None:
        """See :class:`Curves`."""


class SimulatedBell:
    """A :class:`coordinator.training.streams.Notifier` that only says whether it was rung."""

    def __init__(self) -> None:
        self.rung = False

    def ring(self) -> None:
        self.rung = True


@dataclass(frozen=True)
class ServeOptions:
    """A :class:`coordinator.process.settling.Options`."""

    shards: int
    job: Path = Path("jobs/witness.py")
    mode: str | None = None
    replicas: int | None = None
    overrides: tuple[str, ...] = ()
    resume: bool = False
    auto_resume: bool = True


class _Directory(RunDirectory):
    """Files of a run that no fault strikes."""

    def token(self) -> str:
        return "secret"

    def new_token(self) -> str:
        return "secret"

    def write_job(self, document: dict[str, object]) -> None:
        """See :class:`RunDirectory`."""


@dataclass(slots=True, eq=False)
class _Parked:
    """A call that waits for news: ``look`` answers it if there is any. Without news it looks again
    after ``pause_s()``, which is at ``again_at``, and the last time at ``until``."""

    until: float
    look: Callable[[bool], bool]
    pause_s: Callable[[], float]
    again_at: float = 0.0


class Coordinator:
    """One start of a coordinator's process."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.process = process
        self._cluster = cluster
        self._schedule = cluster.schedule
        self._storage = View(cluster.disk, process)
        self._parked: list[_Parked] = []
        self._streams: list[tuple[Stream, Connection]] = []
        self._bell = SimulatedBell()
        self.job_run: JobRun | None = None
        self._plan = cluster.witness.plan.to_json()
        self._echoed = 0

    def live(self) -> Steps:
        """Does the work of ``coordinator serve``; returns why it ended."""
        try:
            ensure_directory(RUN_DIR, self._storage)
        except OSError as error:
            return f"cannot use run directory {RUN_DIR}: {error}"
        store = self._store = FaultyStore(self._cluster.store, self._cluster.faults)
        store.open()
        try:
            run = self._settle_run()
        except (CheckpointError, OSError, sqlite3.Error) as error:
            return f"cannot go on: {error}"
        disk = SlowDisk(self.process, self._storage, run, self._cluster.counts)
        attended = bool(self._cluster.options.holds)
        clock, curves = self._schedule.clock, NoCurves()
        self.job_run = JobRun(run, store, clock, disk, curves, attended=attended)
        self.job_run.bell = cast("Any", self._bell)
        self.engine = Engine(self.job_run, store)
        self.servicer = Servicer(self.engine)
        self._cluster.invariants.begin(self.job_run)
        self._cluster.network.listen(COORDINATOR, self)
        self._cluster.network.echo("coordinator")
        while True:
            self.job_run.tick()
            self._settle()
            yield self._schedule.sleep(TICK_S)

    def _settle_run(self) -> Run:
        """As with --resume auto."""
        directory, cluster = _Directory(RUN_DIR, resume=False), self._cluster
        while True:
            try:
                return settle(
                    ServeOptions(cluster.options.shards),
                    cluster.description,
                    cluster.description.plan(cluster.options.shards),
                    directory,
                    self._store,
                    self._storage,
                )
            except JobDone:
                # The process died when it had just stored that. It goes through the end again,
                # where what the shards hold is looked at.
                cluster.store.forget_the_end()

    def doing(self) -> str:
        if self.job_run is None:
            return "starts"
        return f"{self.job_run.phase}, waits for {self.job_run.waiting_for() or 'nothing'}"

    def terminate(self) -> None:
        """SIGTERM: the run goes on with the next start."""
        if self.job_run is None:
            self.process.kill()
        else:
            self.job_run.drain()
            self._settle()

    def interrupt(self) -> None:
        """SIGINT: the job stops."""
        if self.job_run is None:
            self.process.kill()
        else:
            self.job_run.stop()
            self._settle()

    # -- calls -------------------------------------------------------------------------------

    def handle(self, method: str, request: Any, respond: Respond) -> None:
        try:
            match method:
                case "Watch":
                    held, reader = request
                    self._watch(held, reader, respond)
                case "GetCluster":
                    self._get_cluster(request, respond)
                case "LeaseWork":
                    caller = self._caller(request)
                    reports = self.servicer._reports(caller, request.done)
                    work = self.engine.lease_now(caller, reports, request.received)
                    self._answer_work(work, caller, request.received, pb.LeaseWorkResponse, respond)
                case "CommitBatch":
                    caller = self._caller(request)
                    (report,) = self.servicer._reports(caller, [request.report])
                    work = self.engine.commit_now(caller, request.round, report)
                    self._answer_work(work, caller, 0, pb.CommitBatchResponse, respond)
                case "AwaitHold":
                    self._await_hold(request, respond)
                case "EndHold":
                    self._end_hold(read_hold_end(request), respond)
                case _:
                    answer = _finish(getattr(self.servicer, method)(request, CONTEXT))
                    if method.startswith("Register"):
                        answer.heartbeat_s = self._cluster.options.heartbeat_s
                    respond(answer)
        except AccessDenied as error:
            # Every worker is honest here, whatever is lost, late or repeated.
            self._cluster.invariants.fail(f"the coordinator denied {method}: {error}")
        except PsError as error:
            respond(error)
        self._settle()

    def _caller(self, request: pb.LeaseWorkRequest | pb.CommitBatchRequest) -> Caller:
        return self.servicer._caller(request, CONTEXT, request.policy)

    def _get_cluster(self, request: pb.GetClusterRequest, respond: Respond) -> None:
        name = self.servicer._worker(request.session, CONTEXT)
        self.engine.job_run.members.worker_seen(name, self._schedule.now())

        def look(late: bool) -> bool:
            try:
                shards = self.engine.cluster_now(name)
            except NotReady as error:
                if late:
                    respond(error)
                return late
            except PsError as error:
                respond(error)
                return True
            run = self.engine.run
            respond(
                pb.GetClusterResponse(
                    generation=run.generation,
                    policy=run.policy,
                    plan=self._plan,
                    shards=[
                        pb.ShardAddress(address=s.address, incarnation=s.incarnation)
                        for s in shards
                    ],
                )
            )
            return True

        self._park(look)

    def _await_hold(self, request: pb.AwaitHoldRequest, respond: Respond) -> None:
        def look(late: bool) -> bool:
            job_run = self.engine.job_run
            hold = job_run.holding.look(request.after)
            if hold is not None:
                self._cluster.invariants.check_hold(job_run, hold)
            if hold is not None or late or job_run.phase in ENDED:
                respond(write_hold(hold, job_run))
                return True
            return False

        self._park(look)

    def _end_hold(self, end: HoldEnd, respond: Respond) -> None:
        def look(late: bool) -> bool:
            try:
                if self.engine.job_run.holding.end(end):
                    respond(pb.EndHoldResponse())
                    return True
            except PsError as error:
                respond(error)
                return True
            if late:
                respond(NotReady(f"{end.restore} is still being looked at"))
            return late

        self._park(look)

    def _answer_work(
        self, work: Work, caller: Caller, received: int, response: Any, respond: Respond
    ) -> None:
        last = work
        invariants = self._cluster.invariants

        def look(late: bool) -> bool:
            nonlocal last
            if isinstance(last, Wait) and not late:
                try:
                    last = self.engine._find(caller, received)
                except PsError as error:
                    respond(error)
                    return True
            if isinstance(last, Wait) and not late:
                return False
            if isinstance(last, Train | Round | RoundsLease):
                invariants.check_handed_out(self.engine.job_run, caller.name, last)
            if isinstance(last, Round) and last.decision is not None:
                invariants.check_told(self._store, last.decision)
            lease = write_lease(last, caller.name, self.engine.run, self.engine.authority)
            respond(response(lease=lease))
            return True

        if not isinstance(work, Wait):
            look(True)
        else:
            self._park(look, lambda: pause_s(cast("Wait", last), self._schedule.now()))

    def _park(
        self, look: Callable[[bool], bool], pause_s: Callable[[], float] = lambda: POLL_S
    ) -> None:
        parked = _Parked(self._schedule.now() + POLL_S, look, pause_s)
        if not look(False):
            self._wait(parked)

    def _wait(self, parked: _Parked) -> None:
        """Until the bell rings or it is time to look again."""
        now = self._schedule.now()
        parked.again_at = min(parked.until, now + parked.pause_s())
        self._parked.append(parked)
        self._schedule.after(parked.again_at - now, self.process, self._settle)

    def _watch(self, request: pb.WatchRequest, reader: Process, respond: Respond) -> None:
        stream = self.engine.shards.watch_now(request.shard, from_held(request))
        connection = Connection(self._cluster.network, self.process, reader)
        connection.on_break = lambda: self._watch_ended(stream)
        self._streams.append((stream, connection))
        respond(connection)

    def _watch_ended(self, stream: Stream) -> None:
        self._streams = [item for item in self._streams if item[0] is not stream]
        self.engine.shards.watch_ended(stream)
        self._settle()

    # -- after everything that happens --------------------------------------------------------

    def _settle(self) -> None:
        """Hands out what was said, lets those look again who wait, and looks at it all."""
        job_run = self.job_run
        assert job_run is not None
        while True:
            for stream, connection in list(self._streams):
                self._hand_out(stream, connection)
            now = self._schedule.now()
            rung, self._bell.rung = self._bell.rung, False
            look = [parked for parked in self._parked if rung or parked.again_at <= now]
            if not rung and not look:
                break
            self._parked = [parked for parked in self._parked if parked not in look]
            for parked in look:
                if not parked.look(parked.until <= now):
                    self._wait(parked)
        invariants = self._cluster.invariants
        invariants.check_progress(*job_run.standing)
        invariants.policies.check_run(job_run)
        invariants.check_done(job_run)
        invariants.check_checkpoint(job_run.checkpoints.newest)
        self._cluster.generation = job_run.run.generation
        invariants.check_changed(job_run)
        self._cluster.policy = job_run.run.settings
        if job_run.phase == "training":
            self._cluster.begin_faults()
            if self._echoed != job_run.run.generation:
                self._echoed = job_run.run.generation
                self._cluster.network.echo("coordinator")
        if job_run.phase in ENDED and self.process.alive:
            self._cluster.job_ended(job_run)
        elif job_run.drained and self.process.alive:
            invariants.check_drained(self._store)
            self._cluster.counts["coordinators drained"] += 1
            self._cluster.process_ended(self.process, "drained")

    def _hand_out(self, stream: Stream, connection: Connection) -> None:
        try:
            while (command := stream.next()) is not None:
                self._cluster.invariants.check_told(self._store, command)
                connection.send(to_command(self.engine.authority.with_keys(command)))
                if isinstance(command, Ended):
                    stream.told = stream.over = True
                    self.engine.shards.watch_ended(stream)
        except ResourceExhausted as error:
            connection.end(error)
        if stream.over:
            connection.end(None)
            self._streams = [item for item in self._streams if item[0] is not stream]


def _finish(coroutine: Any) -> Any:
    """The result of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError(f"{coroutine} waits for something")
