"""What a shard has written of snapshots, and reported, in simulated time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pserver.requests import Snapshot, SnapshotOrder
from pserver.snapshots import SnapshotFiles, SnapshotWriter
from psrpc.v1 import coordinator_pb2 as pb
from tests.sim.schedule import Signal, Steps
from tests.sim.table_witness import Contents

if TYPE_CHECKING:
    from tests.sim.shard import Shard

WRITE_S = (0.001, 0.3)
"""How long it takes to write a snapshot."""


class Writer(SnapshotWriter):
    """The real one, with a task in place of its thread."""

    def __init__(self, files: SnapshotFiles, shard: Shard) -> None:
        self._outgoing: list[pb.ReportSnapshotRequest] = []
        self._cuts: dict[str, tuple[Contents, ...] | None] = {}
        super().__init__(files, self._outgoing.append)
        self.files = files
        self._shard = shard
        self._handed = Signal(shard.process.schedule)

    def taken(self, order: SnapshotOrder, snapshot: Snapshot) -> None:
        """See :class:`pserver.shelf.SnapshotSink`."""
        self._cuts[order.name] = self._shard.cut(snapshot)
        super().taken(order, snapshot)

    def _put(self, work: Any) -> None:
        super()._put(work)
        self._handed.send()

    def run(self) -> Steps:
        """Writes and reports, one after the other."""
        schedule = self._shard.process.schedule
        while True:
            while not self._work:
                yield self._handed.wait()
            work = self._work.popleft()
            report = work.report
            if work.snapshot is not None:
                yield schedule.sleep(schedule.random.uniform(*WRITE_S))
                report = self.files.write(work.order, work.snapshot)
                self._shard.written(report, self._cuts[work.order.name])
                self._held -= 1
            self._tell(report)
            while self._outgoing:
                yield from self._shard.report(self._outgoing.pop())
