"""Writes snapshots to the checkpoint directory in the background, and reports them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pserver.core.applied import AppliedSet, epoch_totals
from pserver.core.fence import ShardIdentity
from pserver.core.requests import RestoredState, Snapshot
from pserver.snapshots.evicted_files import EvictedFiles
from pserver.snapshots.row_files import RowFiles, fill_tables
from pserver.tables.tables import Tables
from pserver.updates.engine import Slots
from psrpc.checkpoint.checkpoint import ShardState, WrittenFile, shard_file_name, write_shard_file
from psrpc.checkpoint.load import load_state
from psrpc.checkpoint.rows_chain import load_rows
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import CheckpointError, InvalidArgument, PsError
from psrpc.core.names import inside
from psrpc.core.plan import Plan
from psrpc.core.shard_reports import (
    MAX_EPOCHS,
    AppliedEpoch,
    RowsFileEntry,
    ShardFile,
    SnapshotReport,
)
from psrpc.files.storage import DISK, Storage
from psrpc.ops.logs import get_logger
from psrpc.ops.threads import THREADS, Threads
from psrpc.ops.tracing import span

log = get_logger()

MAX_PENDING = 2
"""Maximum number of snapshots that wait to be written or are being written. Each keeps a shard's
whole state in memory."""

_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class _Work:
    """One piece of work: write ``snapshot``, if there is one, then send a report."""

    order: SnapshotOrder
    report: SnapshotReport
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class SnapshotFiles:
    """Reads and writes a shard's part of its run's checkpoints."""

    identity: ShardIdentity
    plan: Plan
    run_id: str
    run_dir: Path
    storage: Storage = DISK
    _rows: RowFiles = field(init=False, repr=False, compare=False)
    _evicted: EvictedFiles = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = RowFiles(self.identity, self.plan, self.run_id, self.storage)
        object.__setattr__(self, "_rows", rows)
        evicted = EvictedFiles(self.identity, self.plan, self.run_id, self.storage)
        object.__setattr__(self, "_evicted", evicted)

    def write(self, order: SnapshotOrder, snapshot: Snapshot) -> SnapshotReport:
        """Writes ``snapshot`` into the order's directory and closes it. Returns the report for the
        coordinator. One thread may call this."""
        try:
            with span("checkpoint", shard=self.identity.shard, checkpoint=order.name):
                return self._write(order, snapshot)
        finally:
            snapshot.close()

    def _write(self, order: SnapshotOrder, snapshot: Snapshot) -> SnapshotReport:
        shard = self.identity.shard
        values = snapshot.values
        report = self.report(order, values.generation, values.version, snapshot.applied)
        try:
            directory = self._inside(order.directory)
            written = write_shard_file(
                directory / shard_file_name(shard, self.plan.shards),
                self.plan,
                shard,
                ShardState(
                    values=snapshot.values.arrays,
                    elements=snapshot.slots.elements,
                    variables=snapshot.slots.variables,
                    scalars=snapshot.slots.scalars,
                    version=snapshot.values.version,
                    applied=snapshot.applied,
                ),
                run_id=self.run_id,
                generation=snapshot.values.generation,
                global_step=order.global_step,
                storage=self.storage,
            )
            rows = self._write_rows(order, snapshot, directory)
            evicted = self._evicted.write(order, snapshot, directory)
        except Exception as error:
            # Catches any error, because the coordinator waits for a report.
            reason = error.coded if isinstance(error, CheckpointError) else repr(error)
            log.warning("snapshot could not be written", snapshot=order.name, reason=reason)
            return replace(report, error=reason)
        file = ShardFile(
            shard,
            values.version,
            written.name,
            written.nbytes,
            written.sha256,
            tuple(map(_entry, rows)),
            None if evicted is None else _entry(evicted),
        )
        return replace(report, file=file)

    def _write_rows(
        self, order: SnapshotOrder, snapshot: Snapshot, directory: Path
    ) -> tuple[WrittenFile, ...]:
        if snapshot.tables is None:
            return ()
        base = self._inside(order.base) if order.base else None
        return self._rows.write(order, snapshot, directory, base)

    def read(self, checkpoint: str) -> RestoredState:
        """Reads the shard's state from a checkpoint, whose name is relative to the run directory;
        see :func:`psrpc.checkpoint.load.load_state`. Does not read table rows: ``load_rows`` of the
        result later reads them directly into the tables, and may raise CheckpointError, too.

        Raises:
            CheckpointError: the files are damaged, or have other variables or tables than the plan.
        """
        directory = self._inside(checkpoint)
        shard = self.identity.shard
        state = load_state(directory, self.plan, shard, self.run_id, self.storage)

        def fill(tables: Tables) -> None:
            steps = load_rows(directory, self.plan, shard, self.run_id, self.storage)
            fill_tables(tables, steps)

        try:
            applied = AppliedSet.from_epochs(state.applied)
        except InvalidArgument as error:
            raise CheckpointError(f"{directory}: {error}") from None
        return RestoredState(
            values=state.values,
            slots=Slots(state.elements, state.variables, state.scalars),
            applied=applied,
            version=state.version,
            load_rows=fill if self.plan.tables_on(shard) else None,
        )

    def report(
        self,
        order: SnapshotOrder,
        generation: int,
        version: int,
        applied: Iterable[AppliedEpoch] = (),
    ) -> SnapshotReport:
        """Returns the report of a snapshot of ``version``, which includes the batches in
        ``applied``."""
        return SnapshotReport(
            self.identity.incarnation,
            generation,
            order.name,
            ShardFile(self.identity.shard, version),
            epochs=tuple(epoch_totals(applied)[-MAX_EPOCHS:]),
        )

    def _inside(self, name: str) -> Path:
        try:
            return inside(self.run_dir, name, "the directory that the coordinator names")
        except InvalidArgument as error:
            raise CheckpointError(str(error)) from None


def _entry(file: WrittenFile) -> RowsFileEntry:
    return RowsFileEntry(file.name, file.nbytes, file.sha256)


class SnapshotWriter:
    """A :class:`pserver.engine.held_snapshots.SnapshotSink` that writes snapshots in one thread.
    Never blocks its callers.

    A new generation discards work that waits. The snapshot that is just being written is finished,
    but not reported any more."""

    def __init__(
        self,
        files: SnapshotFiles,
        report: Callable[[SnapshotReport], object],
        threads: Threads = THREADS,
    ) -> None:
        """``report`` sends a report to the coordinator, and retries while the coordinator is
        unreachable."""
        self._files = files
        self._report = report
        self._changed = threads.condition()
        # Guarded by the lock of ``_changed``:
        self._generation = 0
        self._work: deque[_Work] = deque()
        self._held = 0  # number of snapshots in _work, plus the one that is being written
        self._closed = False
        self._reports: dict[str, SnapshotReport] = {}
        self._thread = threads.thread(self._run, "snapshots")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Finishes all work, for at most ``timeout_s``."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def begun(self, generation: int) -> None:
        """See :class:`pserver.engine.held_snapshots.SnapshotSink`."""
        with self._changed:
            self._generation = generation
            given_up = [work.snapshot for work in self._work if work.snapshot is not None]
            self._held -= len(given_up)
            self._work.clear()
            self._reports.clear()
        for snapshot in given_up:
            snapshot.close()

    def taken(self, order: SnapshotOrder, snapshot: Snapshot) -> None:
        """See :class:`pserver.engine.held_snapshots.SnapshotSink`."""
        values = snapshot.values
        report = self._files.report(order, values.generation, values.version, snapshot.applied)
        with self._changed:
            if order.write and self._held >= MAX_PENDING:
                full = f"{MAX_PENDING} snapshots wait to be written already"
                report = replace(report, error=full)
            writes = order.write and not report.error
            self._put(_Work(order, report, snapshot if writes else None))
        if not writes:
            snapshot.close()

    def failed(self, order: SnapshotOrder, version: int, reason: str) -> None:
        """See :class:`pserver.engine.held_snapshots.SnapshotSink`."""
        with self._changed:
            report = self._files.report(order, self._generation, version)
            self._put(_Work(order, replace(report, error=reason)))

    def repeated(self, order: SnapshotOrder) -> None:
        """See :class:`pserver.engine.held_snapshots.SnapshotSink`."""
        with self._changed:
            report = self._reports.get(order.name)
            if report is not None:
                self._put(_Work(order, report))

    def _put(self, work: _Work) -> None:
        self._held += work.snapshot is not None
        self._work.append(work)
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closed)
                if not self._work:
                    return
                work = self._work.popleft()
            report = work.report
            if work.snapshot is not None:
                report = self._files.write(work.order, work.snapshot)
                with self._changed:
                    self._held -= 1
            # Releases the snapshot before the report, which may take long.
            del work
            self._tell(report)

    def _tell(self, report: SnapshotReport) -> None:
        with self._changed:
            if report.generation < self._generation:
                return
            self._reports[report.name] = report
            while len(self._reports) > _REMEMBERED:
                del self._reports[next(iter(self._reports))]
        try:
            self._report(report)
        except PsError as error:
            log.warning("snapshot could not be reported", snapshot=report.name, reason=str(error))
