"""What a shard has written of snapshots, and reported, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pserver.core.requests import Snapshot
from pserver.snapshots.writer import SnapshotFiles, SnapshotWriter
from psrpc.core.commands import SnapshotOrder
from psrpc.core.shard_reports import SnapshotReport
from tests.sim.table_witness import Contents

if TYPE_CHECKING:
    from tests.sim.shard import Shard

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
        """See :class:`pserver.engine.held_snapshots.SnapshotSink`."""
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
        """See :class:`SnapshotFiles`."""
        self._wait()
        report = self._files.write(order, snapshot)
        self._written(report)
        return report
