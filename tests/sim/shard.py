"""A shard: the real engine, obeying real commands, on a simulated disk and network."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from coordinator.client import HEARTBEAT_CALL_S
from pserver.coordination import PLACE_S, RECONNECT
from pserver.ending import STAY_S
from pserver.engine import ShardEngine
from pserver.fence import ShardIdentity
from pserver.heartbeats import LEAVING_S
from pserver.obedience import obey
from pserver.requests import RestoredState, Snapshot, SnapshotOrder
from pserver.snapshots import SnapshotFiles
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.errors import (
    AlreadyExists,
    DeadlinePassed,
    JobFailed,
    NotReady,
    PsError,
    ResourceExhausted,
    StaleGeneration,
    Unreachable,
)
from psrpc.plan import Plan
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.version import SOFTWARE
from tests.sim.counting import CountingEngine, CountingTables
from tests.sim.disk import View
from tests.sim.fibers import Fibers
from tests.sim.place import CALL_S, COORDINATOR
from tests.sim.schedule import Effect, Process, Signal, Steps
from tests.sim.service import Service
from tests.sim.stream import Stream
from tests.sim.table_witness import Contents
from tests.sim.writer import Writer

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

NDArray = npt.NDArray[Any]


class Shard:
    """One start of a shard's process."""

    def __init__(self, cluster: Cluster, process: Process, index: int, address: str) -> None:
        self.process = process
        self.fibers = Fibers(process)
        self.index = index
        self.address = address
        self.engine: ShardEngine | None = None
        self.updates: NumpyEngine | None = None
        self._cluster = cluster
        self._schedule = cluster.schedule
        self._network = cluster.network
        self._storage = View(cluster.disk, process)
        self._writer: Writer | None = None
        self._service = Service(cluster, self)
        self._due = Signal(cluster.schedule)
        self._stream: Stream | None = None
        self._unknown = False
        self._leaving = False
        self._stay_until = 0.0
        self._doing = ""
        self._registration = pb.RegisterShardRequest(
            shard=index,
            incarnation=process.incarnation,
            address=address,
            host="here",
            pid=process.incarnation,
            software=SOFTWARE,
        )

    # -- its life ----------------------------------------------------------------------------

    def live(self) -> Steps:
        """Registers, builds the engine, follows commands; returns why it ended."""
        self._network.listen(self.address, self._service)
        try:
            job: pb.RegisterShardResponse = yield from self._register()
        except PsError as error:
            return error
        self.process.spawn(self._beat(job.heartbeat_s), self._end)
        # An update engine takes its time to be built.
        yield self._schedule.sleep(self._schedule.random.uniform(0.0, 0.5))
        plan = Plan.from_json(job.plan)
        identity = ShardIdentity(
            shard=self.index,
            incarnation=self.process.incarnation,
            generation=0,
            policy=0,
        )
        files = SnapshotFiles(identity, plan, job.run_id, Path(job.run_dir), self._storage)
        self._writer = Writer(files, self)
        optimizer = json.loads(job.optimizer)
        if self._cluster.options.known:
            self.updates = NumpyEngine(optimizer, plan, self.index)
        else:
            rows = self._cluster.witness.rows
            self.updates = CountingEngine(optimizer, plan, self.index, rows)
        clock = self._schedule.clock
        self.engine = ShardEngine(identity, plan, self.updates, self._writer, clock)
        if not self._cluster.options.known:
            own = self._cluster.witness.tables.ids[self.index].own
            self.engine._held.tables = CountingTables(plan, self.index, own)
        self._writer.start()
        why: PsError | None = yield from self._follow(self.engine)
        return why

    def _end(self, why: Any) -> None:
        self._cluster.process_ended(self.process, why)

    def terminate(self) -> None:
        """SIGTERM: the state is saved first, if there is any and it does not take too long."""
        self._leaving = True
        self._due.send()
        self._stay_until = self._schedule.now() + STAY_S
        self._schedule.after(STAY_S, self.process, self._stayed, "has waited long enough")

    def _stayed(self, why: Any) -> None:
        """As in :meth:`pserver.ending.Ending.wait`."""
        left_s = self._stay_until - self._schedule.now()
        if left_s > 0:
            self._schedule.after(left_s, self.process, self._stayed, why)
        else:
            self._end(why)

    def doing(self) -> str:
        """See :class:`tests.sim.cluster.Life`."""
        engine = self.engine
        if engine is None:
            return "registers"
        report = engine.report()
        return (
            f"generation {report.generation} version {report.version}, "
            f"{report.waiting_for or 'waits for nothing'}; {self._doing}"
        )

    def _register(self) -> Steps:
        began = self._schedule.now()
        while True:
            try:
                job: pb.RegisterShardResponse = yield from self._persist(
                    "RegisterShard", self._registration
                )
            except AlreadyExists:
                if self._schedule.now() - began >= PLACE_S:
                    raise
                yield self._schedule.sleep(PLACE_S / 20)
            else:
                return job

    def _persist(self, method: str, request: Any) -> Steps:
        """A call that is repeated while the coordinator cannot be reached."""
        failures = 0
        while True:
            try:
                response = yield self._network.call(COORDINATOR, method, request, CALL_S)
            except (Unreachable, DeadlinePassed):
                failures += 1
                yield self._pause(failures)
            else:
                return response

    def _pause(self, failures: int) -> Effect:
        pause_s = RECONNECT.pause_s(failures, self._schedule.random.random())
        return self._schedule.sleep(pause_s)

    def _beat(self, heartbeat_s: float) -> Steps:
        while True:
            yield self._due.wait(LEAVING_S if self._leaving else heartbeat_s)
            if self._leaving and (self.engine is None or not self.engine.report().initialized):
                return "has nothing to save"
            request = pb.HeartbeatShardRequest(
                shard=self.index, incarnation=self.process.incarnation, leaving=self._leaving
            )
            if self.engine is not None:
                report = self.engine.report()
                request.generation = report.generation
                request.version = report.version
                request.revoked = report.revoked
                request.waiting_for = report.waiting_for
                request.failure = self.engine.failure
            try:
                answer: pb.HeartbeatShardResponse = yield self._network.call(
                    COORDINATOR, "HeartbeatShard", request, HEARTBEAT_CALL_S
                )
            except (Unreachable, DeadlinePassed):
                pass
            except PsError as error:
                return error
            else:
                if answer.saved and request.leaving:
                    return "is saved"
                if answer.saving:
                    self._stay_until = self._schedule.now() + STAY_S
                if answer.unknown:
                    self._unknown = True
                    if self._stream is not None:
                        self._stream.cancel()
            if request.failure:
                return JobFailed(request.failure)

    # -- commands: as in pserver.coordination ------------------------------------------------

    def _follow(self, engine: ShardEngine) -> Steps:
        failures = 0
        while True:
            try:
                if self._unknown:
                    self._unknown = False
                    self._doing = "registers again"
                    try:
                        yield self._network.call(
                            COORDINATOR, "RegisterShard", self._registration, CALL_S
                        )
                    except (AlreadyExists, StaleGeneration) as error:
                        return error
                self._doing = "watches"
                self._stream = yield from self._watch(engine)
                while True:
                    command: pb.WatchResponse = yield self._stream.receive()
                    failures = 0
                    kind = command.WhichOneof("command")
                    self._schedule.trace(self.process, "obeys", kind)
                    if kind == "shutdown":
                        shutdown = command.shutdown
                        return JobFailed(shutdown.reason) if shutdown.failed else None
                    yield from self._obey(engine, command)
            except StaleGeneration:
                self._unknown = True
            except (Unreachable, DeadlinePassed, NotReady):
                pass
            except ResourceExhausted as error:
                self._schedule.trace(self.process, "lags behind:", error)
            except PsError as error:
                return error
            failures += 1
            yield self._pause(failures)

    def _watch(self, engine: ShardEngine) -> Steps:
        report = engine.report()
        request = pb.WatchRequest(
            shard=self.index,
            incarnation=self.process.incarnation,
            generation=report.generation,
            initialized=report.initialized,
            version=report.version,
        )
        stream: Stream = yield self._network.call(
            COORDINATOR, "Watch", (request, self.process), CALL_S
        )
        if self._unknown:
            stream.cancel()
        return stream

    def _obey(self, engine: ShardEngine, command: pb.WatchResponse) -> Steps:
        ready = self._carry_out(engine, command)
        kind = command.WhichOneof("command")
        self._service.changed(begun=ready is not None and not ready.error)
        if ready is not None:
            self._doing = f"reports generation {ready.generation}"
            with suppress(StaleGeneration):
                yield from self._persist("ReportShardReady", ready)
            self._doing = "watches"
        if kind in ("begin", "revocation"):
            self._due.send()
            self._network.echo("shard")

    def _carry_out(
        self, engine: ShardEngine, command: pb.WatchResponse
    ) -> pb.ReportShardReadyRequest | None:
        """Obeys, maybe while another thread has a gradient that is arriving."""
        said: list[pb.ReportShardReadyRequest | None] = []
        last = self._network.last(self.address)

        def meanwhile() -> None:
            if not said:
                said.append(obey(engine, command, self._read))

        if last is not None and self._cluster.faults.strikes("commands meanwhile"):
            self._service.meanwhile = meanwhile
            try:
                self._service.handle(*last, lambda _answer: None)
            finally:
                self._service.meanwhile = lambda: None
        return said[0] if said else obey(engine, command, self._read)

    def _read(self, name: str) -> RestoredState:
        assert self._writer is not None
        restored = self._writer.files.read(name)
        self._cluster.counts["shards restored"] += 1
        tables = self._cluster.invariants.tables
        return tables.watched(restored, name, self.index, self._storage)

    # -- snapshots ---------------------------------------------------------------------------

    def cut(self, order: SnapshotOrder, snapshot: Snapshot) -> tuple[Contents, ...] | None:
        """A snapshot was taken; returns the rows that are to be written with it."""
        return self._cluster.invariants.check_snapshot(self, order, snapshot)

    def written(self, report: pb.ReportSnapshotRequest, rows: tuple[Contents, ...] | None) -> None:
        """It was written, or could not be."""
        self._cluster.invariants.tables.written(report, rows)

    def report(self, request: pb.ReportSnapshotRequest) -> Steps:
        """Tells what came of it."""
        try:
            yield from self._persist("ReportSnapshot", request)
        except PsError as error:
            self._schedule.trace(self.process, "is not heard on", request.name, error)
