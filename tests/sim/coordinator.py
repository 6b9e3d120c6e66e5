"""A coordinator: the real course, engine and store, driven call by call in simulated time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from coordinator.checkpoints import Checkpoints, remove_unfinished
from coordinator.course import Course
from coordinator.curves import Curves
from coordinator.disk import Choice, Committed, choose, commit
from coordinator.engine import POLL_S, Caller, Engine
from coordinator.lifecycle import ENDED
from coordinator.messages import read_holding, read_report, read_reports, write_command, write_lease
from coordinator.run import Run
from coordinator.servicer import Servicer
from coordinator.snapshots import Taken
from coordinator.store import ENDED as ENDED_KEY
from coordinator.store import GENERATION, SINCE, Store
from coordinator.streams import Stream
from coordinator.work import Ended, Round, SnapshotOrder, Train, Wait, Work
from psrpc.errors import NotReady, PsError, ResourceExhausted
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.disk import View
from tests.sim.network import Respond
from tests.sim.network import Stream as Connection
from tests.sim.place import COORDINATOR, RUN_DIR
from tests.sim.schedule import Crash, Process, Steps

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

TICK_S = 0.5

DISK_S = (0.001, 0.5)
"""How long a piece of work on the disk takes."""


class StoreFile:
    """What lasts of a store, between one coordinator and the next."""

    _spare: ClassVar[list[sqlite3.Connection]] = []
    """Databases with all tables and no rows: making tables takes longer than all that follows."""

    def __init__(self) -> None:
        self.connection = self._spare.pop() if self._spare else None

    def forget_the_end(self) -> None:
        """The run goes on, as with --resume."""
        if self.connection is not None:
            self.connection.rollback()
            self.connection.execute("DELETE FROM meta WHERE key = ?", (ENDED_KEY,))

    def close(self) -> None:
        """Nobody needs it any more."""
        if self.connection is not None:
            self.connection.rollback()
            names = self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (name,) in names.fetchall():
                self.connection.execute(f"DELETE FROM {name}")
            self._spare.append(self.connection)
            self.connection = None


class FaultyStore(Store):
    """The real one, on a database in memory. Its transactions are SQLite's; the process may die
    before or after each statement, and the disk may refuse one."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(Path(":memory:"))
        self._file = cluster.store
        self._faults = cluster.faults

    def open(self) -> None:
        """See :class:`Store`."""
        if self._file.connection is None:
            super().open()
            self._file.connection = self._connection
        else:
            # What a dead process left open never happened.
            self._file.connection.rollback()
            self._connection = self._file.connection

    def _reserve(self) -> None:
        """Memory needs no reserve."""

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement.startswith(("SELECT", "ROLLBACK")):
            return super()._run(statement, *values)
        if self._faults.strikes("crash at the store"):
            raise Crash
        if self._faults.strikes("store refuses") and statement.startswith(("INSERT", "COMMIT")):
            raise sqlite3.OperationalError("disk I/O error")
        cursor = super()._run(statement, *values)
        if self._faults.strikes("crash at the store"):
            raise Crash
        return cursor


class NoCurves(Curves):
    """Curves that nobody looks at."""

    def __init__(self) -> None:
        super().__init__(RUN_DIR / "tensorboard")

    def step(self, step: int, loss: float, staleness: float) -> None:
        """See :class:`Curves`."""

    def flush(self, steps_per_s: float, examples_per_s: float) -> None:
        """See :class:`Curves`."""

    def epoch(self, values: Mapping[str, float], step: int) -> None:
        """See :class:`Curves`."""


class SlowDisk:
    """A :class:`coordinator.disk.DiskWork` in simulated time, one piece after the other."""

    def __init__(self, cluster: Cluster, process: Process, storage: View, run: Run) -> None:
        self._cluster = cluster
        self._process = process
        self._storage = storage
        self._run = run
        self._checkpoints = Checkpoints(run, storage)
        self._free_at = 0.0

    def prepare(self, order: SnapshotOrder) -> None:
        """See :class:`coordinator.disk.DiskWork`."""
        self._checkpoints.prepare(order)

    def discard(self, order: SnapshotOrder) -> None:
        """See :class:`coordinator.disk.DiskWork`."""
        self._checkpoints.discard(order)

    def commit(
        self,
        taken: Taken,
        generation: int,
        scores: Mapping[tuple[int, int], float],
        in_use: Collection[str],
        done: Callable[[Committed], None],
    ) -> None:
        """See :class:`coordinator.disk.DiskWork`."""

        def work() -> None:
            done(commit(self._checkpoints, taken, generation, scores, in_use))

        self._soon(work)

    def choose(self, refused: Mapping[str, str], done: Callable[[Choice], None]) -> None:
        """See :class:`coordinator.disk.DiskWork`."""

        def work() -> None:
            choice = choose(self._run, refused, self._storage)
            if choice.chosen is not None and choice.chosen.remarks:
                self._cluster.counts["fall-backs"] += 1
            done(choice)

        self._soon(work)

    def _soon(self, work: Callable[[], None]) -> None:
        schedule = self._process.schedule
        now = schedule.now()
        self._free_at = max(self._free_at, now) + schedule.random.uniform(*DISK_S)
        schedule.after(self._free_at - now, self._process, work)


class SimulatedBell:
    """A :class:`coordinator.bell.Bell` that only says whether it was rung."""

    def __init__(self) -> None:
        self.rung = False

    def ring(self) -> None:
        """See :class:`coordinator.bell.Bell`."""
        self.rung = True


@dataclass(slots=True)
class _Parked:
    """A call that waits for news: ``look`` answers it if there is any."""

    until: float
    look: Callable[[bool], bool]


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
        self.course: Course | None = None

    def live(self) -> Steps:
        """What ``coordinator serve`` does; returns why it ended."""
        store = self._store = FaultyStore(self._cluster)
        store.open()
        remove_unfinished(RUN_DIR, self._storage)
        run = Run(
            run_id="r1",
            run_dir=RUN_DIR,
            job_path="jobs/witness.py",
            overrides=(),
            token="secret",
            description=self._cluster.description,
            plan=self._cluster.witness.plan,
            generation=store.get(GENERATION) or 0,
            since=store.get(SINCE) or 0,
        )
        disk = SlowDisk(self._cluster, self.process, self._storage, run)
        self.course = Course(run, store, self._schedule.clock, disk, NoCurves())
        self.course.bell = cast(Any, self._bell)
        self.engine = Engine(self.course, store)
        self.servicer = Servicer(self.engine)
        self._cluster.invariants.begin(self.course)
        self._cluster.network.listen(COORDINATOR, self)
        self._cluster.network.echo("coordinator")
        while True:
            self.course.tick()
            self._settle()
            yield self._schedule.sleep(TICK_S)

    def doing(self) -> str:
        """See :class:`tests.sim.cluster.Life`."""
        if self.course is None:
            return "starts"
        return f"{self.course.phase}, waits for {self.course.waiting_for() or 'nothing'}"

    def terminate(self) -> None:
        """SIGTERM."""
        if self.course is None:
            self.process.kill()
        else:
            self.course.stop()
            self._settle()

    # -- calls -------------------------------------------------------------------------------

    def handle(self, method: str, request: Any, respond: Respond) -> None:
        """See :class:`tests.sim.network.Server`."""
        try:
            match method:
                case "Watch":
                    held, reader = request
                    self._watch(held, reader, respond)
                case "GetCluster":
                    self._get_cluster(request, respond)
                case "LeaseWork":
                    caller = _caller(request)
                    work = self.engine.lease_now(
                        caller, read_reports(request.done), request.received
                    )
                    self._answer_work(work, caller, request.received, pb.LeaseWorkResponse, respond)
                case "CommitBatch":
                    caller = _caller(request)
                    work = self.engine.commit_now(
                        caller, request.round, read_report(request.report)
                    )
                    self._answer_work(work, caller, 0, pb.CommitBatchResponse, respond)
                case _:
                    answer = _finish(getattr(self.servicer, method)(request, None))
                    if method.startswith("Register"):
                        answer.heartbeat_s = self._cluster.options.heartbeat_s
                    respond(answer)
        except PsError as error:
            respond(error)
        self._settle()

    def _get_cluster(self, request: pb.GetClusterRequest, respond: Respond) -> None:
        name, incarnation = request.worker, request.incarnation
        self.engine.course.members.worker_seen(name, incarnation, self._schedule.now())

        def look(late: bool) -> bool:
            try:
                shards = self.engine.cluster_now(name, incarnation)
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
                    shards=[
                        pb.ShardAddress(address=s.address, incarnation=s.incarnation)
                        for s in shards
                    ],
                )
            )
            return True

        self._park(look)

    def _answer_work(
        self, work: Work, caller: Caller, received: int, response: Any, respond: Respond
    ) -> None:
        last = work

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
            run = self.engine.run
            if isinstance(last, Train):
                self._cluster.invariants.check_handed_out(run.generation, last.batches)
            elif isinstance(last, Round):
                self._cluster.invariants.check_handed_out(run.generation, [last.attempt])
                if last.decision is not None:
                    self._cluster.invariants.check_told(self._store, last.decision)
            respond(response(lease=write_lease(last, run.generation, run.policy)))
            return True

        if not isinstance(work, Wait):
            look(True)
        else:
            self._park(look)

    def _park(self, look: Callable[[bool], bool]) -> None:
        if not look(False):
            self._parked.append(_Parked(self._schedule.now() + POLL_S, look))
            self._schedule.after(POLL_S, self.process, self._settle)

    def _watch(self, request: pb.WatchRequest, reader: Process, respond: Respond) -> None:
        stream = self.engine.watch_now(request.shard, read_holding(request))
        connection = Connection(self._cluster.network, self.process, reader)
        connection.on_break = lambda: self._watch_ended(stream)
        self._streams.append((stream, connection))
        respond(connection)

    def _watch_ended(self, stream: Stream) -> None:
        self._streams = [item for item in self._streams if item[0] is not stream]
        self.engine.watch_ended(stream)
        self._settle()

    # -- after everything that happens --------------------------------------------------------

    def _settle(self) -> None:
        """Hands out what was said, lets those look again who wait, and looks at it all."""
        course = self.course
        assert course is not None
        while True:
            for stream, connection in list(self._streams):
                self._hand_out(stream, connection)
            now = self._schedule.now()
            rung, self._bell.rung = self._bell.rung, False
            late = any(parked.until <= now for parked in self._parked)
            if not rung and not late:
                break
            waiting, self._parked = self._parked, []
            self._parked += [p for p in waiting if not p.look(p.until <= now)]
        invariants = self._cluster.invariants
        invariants.check_progress(*course.standing)
        invariants.check_done(course)
        invariants.check_checkpoint(course.newest_checkpoint)
        self._cluster.generation = course.run.generation
        if course.phase == "training":
            self._cluster.begin_faults()
        if course.phase in ENDED and self.process.alive:
            self._cluster.job_ended(course)

    def _hand_out(self, stream: Stream, connection: Connection) -> None:
        try:
            while (command := stream.next()) is not None:
                self._cluster.invariants.check_told(self._store, command)
                connection.send(write_command(command))
                if isinstance(command, Ended):
                    stream.told = stream.over = True
                    self.engine.watch_ended(stream)
        except ResourceExhausted as error:
            connection.end(error)
        if stream.over:
            connection.end(None)
            self._streams = [item for item in self._streams if item[0] is not stream]


def _caller(request: pb.LeaseWorkRequest | pb.CommitBatchRequest) -> Caller:
    return Caller(request.worker, request.incarnation, request.generation, request.policy)


def _finish(coroutine: Any) -> Any:
    """The result of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError(f"{coroutine} waits for something")
