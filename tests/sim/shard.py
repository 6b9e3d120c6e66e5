"""A shard: the real one but for its server, on a simulated disk and network; in a process of its
own, or in that of a worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pserver.core.fence import ShardIdentity
from pserver.core.requests import PushRequest, PushResult, RestoredState, Snapshot, Values
from pserver.engine.engine import ShardEngine
from pserver.process.config import ServeConfig
from pserver.process.coordination import Coordination
from pserver.process.ending import Ending
from pserver.process.shard import FLUSH_S
from pserver.snapshots.writer import SnapshotFiles, SnapshotWriter
from pserver.tables.tables import Tables, TablesUpdate
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import PsError
from psrpc.core.plan import Plan
from psrpc.core.shard_reports import SnapshotReport
from psrpc.core.tables import Ids, Rows
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.calls import ToCoordinator
from tests.sim.disk import View
from tests.sim.fibers import Condition, Fibers
from tests.sim.schedule import Process, Steps
from tests.sim.service import Service
from tests.sim.table_witness import COLUMNS, RARE, SEEN, Contents
from tests.sim.witness import ARENA

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.worker import Worker


class CountingEngine(NumpyEngine):
    """The real one; but whatever is not zero of the witness adds 1 to its entry, whatever its
    weight in its round and the rate that it is applied at. So an entry still shows how many
    updates a record was in."""

    def __init__(self, optimizer: Mapping[str, Any], plan: Plan, shard: int, rows: int) -> None:
        """The witness is the first ``rows`` entries of the shard's part."""
        super().__init__(optimizer, plan, shard)
        self._rows = rows

    def apply(self, gradients: Mapping[str, NDArray], rate_scale: float = 1.0) -> None:
        if gradients:
            witness = gradients[ARENA][: self._rows]
            np.copyto(witness, np.float32(-1.0 / rate_scale), where=witness != 0)
        super().apply(gradients, rate_scale)


class CountingTables(Tables):
    """The real ones; but an update adds to a row of ``seen`` how many records it stands for, and 1
    to that of ``rare``, whatever weights and rate it comes with."""

    def __init__(self, plan: Plan, shard: int, own: Ids) -> None:
        """``own`` are the ids of ``seen`` that stand for one record."""
        super().__init__(plan, shard)
        self._own = np.sort(own)

    def prepare(self, rows: Mapping[int, Rows]) -> TablesUpdate:
        counted = dict(rows)
        if SEEN in rows:
            ids, values = rows[SEEN].ids, rows[SEEN].values
            one = np.abs(values[np.isin(ids, self._own), 0]).max()
            counted[SEEN] = Rows(ids, np.rint(values[:, :1] / one) * COLUMNS)
        if RARE in rows:
            ids = rows[RARE].ids
            counted[RARE] = Rows(ids, np.full((len(ids), 1), -1.0, np.float32))
        prepared = super().prepare(counted)
        scaled = [rows for table, rows in counted.items() if table in (SEEN, RARE)]
        return _Unscaled(prepared, scaled)


class _Unscaled(TablesUpdate):
    """An update of which some ``rows`` are applied as they are, whatever the rate."""

    def __init__(self, prepared: TablesUpdate, rows: Sequence[Rows]) -> None:
        super().__init__(prepared.parts)
        self._rows = rows

    def apply(self, rate_scale: float, iterations: int, version: int) -> None:
        for rows in self._rows:
            np.divide(rows.values, np.float32(rate_scale), out=rows.values)
        super().apply(rate_scale, iterations, version)


NDArray = npt.NDArray[Any]

WRITE_S = (0.001, 0.3)
"""How long it takes to write a snapshot."""


class Writer(SnapshotWriter):
    """The real one, on a simulated thread. Looks at each snapshot as it is taken and written."""

    def __init__(
        self,
        files: SnapshotFiles,
        shard: Shard,
        report: Callable[[SnapshotReport], object],
    ) -> None:
        self.files = files
        self._shard = shard
        self._cuts: dict[str, tuple[Contents, ...] | None] = {}
        slow: Any = _SlowFiles(files, self._wait, self._written)
        super().__init__(slow, report, shard.fibers)

    def taken(self, order: SnapshotOrder, snapshot: Snapshot) -> None:
        self._cuts[order.name] = self._shard.cut(order, snapshot)
        super().taken(order, snapshot)

    def _wait(self) -> None:
        schedule = self._shard.process.schedule
        self._shard.fibers.sleep(schedule.random.uniform(*WRITE_S))

    def _written(self, report: SnapshotReport) -> None:
        self._shard.written(report, self._cuts[report.name])


class _SlowFiles:
    """Those of a shard, which take their time."""

    def __init__(self, files: SnapshotFiles, wait: Any, written: Any) -> None:
        self.report = files.report
        self._files = files
        self._wait = wait
        self._written = written

    def write(self, order: SnapshotOrder, snapshot: Snapshot) -> SnapshotReport:
        self._wait()
        report = self._files.write(order, snapshot)
        self._written(report)
        return report


BUILD_S = 0.5
"""An update engine takes as long as this to be built, or less."""


class WatchedEngine(ShardEngine):
    """One whose pushes are looked at when it takes them, also those that come without a call."""

    shard: Shard

    def _push(
        self, request: PushRequest, *args: Any, **options: Any
    ) -> tuple[PushResult, Values | None]:
        result, values = super()._push(request, *args, **options)
        self.shard.cluster.invariants.check_accepted(self.shard, request, result)
        return result, values


class Shard:
    """One start of a shard: of its process or, with ``ending``, of a slice on a thread of a
    worker's ``process``, with an incarnation of its own."""

    def __init__(
        self,
        cluster: Cluster,
        process: Process,
        index: int,
        fibers: Fibers,
        ending: Ending | None = None,
    ) -> None:
        address = cluster.free_address(index)
        self.process = process
        self.cluster = cluster
        self.fibers = fibers
        self.index = index
        self.hosted = ending is not None
        self.incarnation = cluster.next_incarnation() if self.hosted else process.incarnation
        self.address = address
        self.engine: ShardEngine | None = None
        self.updates: NumpyEngine | None = None
        self.service = Service(cluster, self)
        self._ending = ending or Ending(fibers)
        self._storage = View(cluster.disk, process)
        self._writer: Writer | None = None

    def __repr__(self) -> str:
        slice_ = f"slice {self.index}#{self.incarnation} of {self.process}"
        return slice_ if self.hosted else repr(self.process)

    # -- its life ----------------------------------------------------------------------------

    def live(self) -> Steps:
        """Does the work of ``pserver serve``; returns why it ended."""
        self.cluster.network.listen(self.address, self.service)
        try:
            yield self.fibers.run(self._serve)
        except PsError as error:
            return error
        return self._ending.error

    def terminate(self) -> None:
        """SIGTERM."""
        self._ending.stop()

    def doing(self) -> str:
        if self.engine is None:
            return "registers"
        report = self.engine.report()
        waits = report.waiting_for or "waits for nothing"
        return f"generation {report.generation} version {report.version}, {waits}"

    def _serve(self) -> PsError | None:
        try:
            self.serve(lambda _engine: None)
        except PsError as error:
            return error
        return None

    def serve(self, opened: Callable[[ShardEngine], object]) -> None:
        """Serves until its end."""
        with _Coordination(self, self._ending) as coordination:
            job = coordination.register(lambda: self.address)
            self.fibers.sleep(self.cluster.random.uniform(0.0, BUILD_S))
            engine = self._build(job, coordination)
            opened(engine)
            coordination.follow(engine, self._read, lambda: None)
            self._ending.save_first(coordination.leave)
            self._ending.wait()
            if self.hosted:
                self.close()

    def close(self) -> None:
        """Makes it unreachable, in a process that goes on."""
        self.cluster.network.leave(self.address, self.service)
        self.service.close()
        if self._writer is not None:
            self._writer.stop(FLUSH_S)

    def _build(self, job: pb.RegisterShardResponse, coordination: Coordination) -> ShardEngine:
        plan = Plan.from_json(job.plan)
        identity = ShardIdentity(self.index, self.incarnation, generation=0, policy=0)
        files = SnapshotFiles(identity, plan, job.run_id, Path(job.run_dir), self._storage)
        self._writer = Writer(files, self, coordination.report_snapshot)
        optimizer = json.loads(job.optimizer)
        cluster = self.cluster
        if cluster.options.known:
            self.updates = NumpyEngine(optimizer, plan, self.index)
        else:
            rows = cluster.witness.rows if plan.shard_nbytes(self.index) else 0
            self.updates = CountingEngine(optimizer, plan, self.index, rows)
        kind = WatchedEngine if self.hosted else ShardEngine
        self.engine = kind(
            identity,
            plan,
            self.updates,
            self._writer,
            cluster.schedule.clock,
            threads=self.fibers,
        )
        if isinstance(self.engine, WatchedEngine):
            self.engine.shard = self
            changed = self.engine._changed
            assert isinstance(changed, Condition)
            # Calls of its own worker change it, too.
            changed.heard = self._heard
        if not cluster.options.known and self.engine._held.tables.specs:
            own = cluster.witness.tables.ids[self.index].own
            self.engine._held.tables = CountingTables(plan, self.index, own)
        self._writer.start()
        return self.engine

    def _heard(self) -> None:
        self.cluster.schedule.after(0.0, self.process, self.service.changed)

    def _read(self, name: str) -> RestoredState:
        assert self._writer is not None
        restored = self._writer.files.read(name)
        self.cluster.counts["shards restored"] += 1
        tables = self.cluster.invariants.tables
        return tables.watched(restored, name, self.index, self._storage)

    # -- snapshots ---------------------------------------------------------------------------

    def cut(self, order: SnapshotOrder, snapshot: Snapshot) -> tuple[Contents, ...] | None:
        """A snapshot was taken; returns the rows that are to be written with it."""
        return self.cluster.invariants.check_snapshot(self, order, snapshot)

    def written(self, report: SnapshotReport, rows: tuple[Contents, ...] | None) -> None:
        """It was written, or could not be."""
        self.cluster.invariants.tables.written(report, rows)


class _Coordination(Coordination):
    """Looks at what becomes of each command, and has some carried out at a bad moment."""

    def __init__(self, shard: Shard, ending: Ending) -> None:
        process, fibers, cluster = shard.process, shard.fibers, shard.cluster
        super().__init__(
            ToCoordinator(cluster.network, process, fibers),
            shard.index,
            shard.incarnation,
            cluster.options.patience_s,
            ending,
            fibers,
            worker=process.incarnation if shard.hosted else 0,
        )
        self._sim = shard

    def _obey(
        self,
        engine: ShardEngine,
        command: pb.WatchResponse,
        read: Callable[[str], RestoredState],
        begun: Callable[[], object],
    ) -> None:
        kind = command.WhichOneof("command")
        network = self._sim.cluster.network
        network.schedule.trace(self._sim.process, "obeys", kind)
        super()._obey(engine, command, read, begun)
        if kind in ("begin", "revocation"):
            network.echo("shard")

    def _carry_out(
        self, engine: ShardEngine, command: pb.WatchResponse, read: Callable[[str], RestoredState]
    ) -> pb.ReportShardReadyRequest | None:
        """Obeys, maybe while another thread has a gradient that is arriving."""
        said: list[pb.ReportShardReadyRequest | None] = []
        carry_out, service, cluster = super()._carry_out, self._sim.service, self._sim.cluster
        last = cluster.network.last(self._sim.address)

        def meanwhile() -> None:
            if not said:
                said.append(carry_out(engine, command, read))

        if last is not None and cluster.faults.strikes("commands meanwhile"):
            service.meanwhile = meanwhile
            try:
                service.handle(*last, lambda _answer: None)
            finally:
                service.meanwhile = lambda: None
        meanwhile()
        ready = said[0]
        service.changed(begun=ready is not None and not ready.error)
        return ready


def serve_slice(
    worker: Worker,
    config: ServeConfig,
    ending: Ending,
    _host: int,
    opened: Callable[[ShardEngine], object],
) -> None:
    """Does the work of :func:`pserver.process.shard.serve` on a thread of ``worker``."""
    cluster = worker.cluster
    slice_ = Shard(cluster, worker.process, config.shard, worker.fibers, ending)
    cluster.network.listen(slice_.address, slice_.service)
    cluster.counts["slices hosted"] += 1
    worker.slices.append(slice_)
    try:
        slice_.serve(opened)
    finally:
        worker.slices.remove(slice_)
        slice_.close()
    if ending.error is not None:
        raise ending.error
