"""Writes snapshots to the checkpoint directory in the background, and reports them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pserver.applied import AppliedSet
from pserver.fence import ShardIdentity
from pserver.requests import Snapshot, SnapshotOrder
from pserver.updates.engine import Slots
from psrpc.checkpoint import ShardState, load_state, shard_file_name, write_shard_file
from psrpc.errors import CheckpointError, PsError
from psrpc.logs import get_logger
from psrpc.plan import Plan
from psrpc.v1 import coordinator_pb2 as pb

log = get_logger()

MAX_PENDING = 2
"""Snapshots that wait to be written. Each holds a shard's whole state in memory."""

_REMEMBERED = 64


@dataclass(frozen=True)
class Restored:
    """A shard's state from a checkpoint, in the engine's words."""

    state: ShardState
    slots: Slots
    applied: AppliedSet


def restore(directory: Path, plan: Plan, shard: int) -> Restored:
    """Reads what ``shard`` of ``plan`` takes over; see :func:`psrpc.checkpoint.load_state`."""
    state = load_state(directory, plan, shard)
    return Restored(
        state=state,
        slots=Slots(state.elements, state.variables, state.scalars),
        applied=AppliedSet.from_epochs(state.applied),
    )


class SnapshotWriter:
    """A :class:`pserver.shelf.SnapshotSink` with one thread. Never blocks who hands it work."""

    def __init__(
        self,
        identity: ShardIdentity,
        plan: Plan,
        run_id: str,
        run_dir: Path,
        report: Callable[[pb.ReportSnapshotRequest], object],
    ) -> None:
        """``report`` sends to the coordinator, again and again while that cannot be reached."""
        self._identity = identity
        self._plan = plan
        self._run_id = run_id
        self._run_dir = run_dir
        self._report = report
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0  # guarded by _lock, as are the reports
        self._reports: dict[str, pb.ReportSnapshotRequest] = {}
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Finishes what was handed in, for ``timeout_s`` at most."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def taken(self, order: SnapshotOrder, snapshot: Snapshot) -> None:
        """See :class:`pserver.shelf.SnapshotSink`."""
        version = snapshot.values.version
        if not order.write:
            self._work.put(lambda: self._tell(self._request(order, version)))
            return
        with self._lock:
            if self._pending < MAX_PENDING:
                self._pending += 1
                self._work.put(lambda: self._write(order, snapshot))
                return
        self.failed(order, version, f"{MAX_PENDING} snapshots wait to be written already")

    def failed(self, order: SnapshotOrder, version: int, reason: str) -> None:
        """See :class:`pserver.shelf.SnapshotSink`."""
        request = self._request(order, version)
        request.error = reason
        self._work.put(lambda: self._tell(request))

    def repeated(self, order: SnapshotOrder) -> None:
        """See :class:`pserver.shelf.SnapshotSink`."""
        with self._lock:
            request = self._reports.get(order.name)
        if request is not None:
            self._work.put(lambda: self._tell(request))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # It holds a snapshot, which must not outlive its use.
            del work

    def _write(self, order: SnapshotOrder, snapshot: Snapshot) -> None:
        request = self._request(order, snapshot.values.version)
        try:
            directory = self._directory(order)
            written = write_shard_file(
                directory / shard_file_name(self._identity.shard, self._plan.shards),
                self._plan,
                self._identity.shard,
                ShardState(
                    values=snapshot.values.arrays,
                    elements=snapshot.slots.elements,
                    variables=snapshot.slots.variables,
                    scalars=snapshot.slots.scalars,
                    version=snapshot.values.version,
                    applied=snapshot.applied,
                ),
                run_id=self._run_id,
                generation=self._identity.generation,
                global_step=order.global_step,
            )
        except Exception as error:
            # Whatever it is, the coordinator waits for a word.
            request.error = str(error) if isinstance(error, CheckpointError) else repr(error)
            log.warning("snapshot could not be written", snapshot=order.name, reason=request.error)
        else:
            request.file, request.nbytes, request.sha256 = (
                written.name,
                written.nbytes,
                written.sha256,
            )
        del snapshot
        with self._lock:
            self._pending -= 1
        self._tell(request)

    def _directory(self, order: SnapshotOrder) -> Path:
        directory = (self._run_dir / order.directory).resolve()
        if not directory.is_relative_to(self._run_dir.resolve()):
            raise CheckpointError(
                f"snapshot {order.name} is ordered into {directory}; expected a place in"
                f" {self._run_dir}"
            )
        return directory

    def _request(self, order: SnapshotOrder, version: int) -> pb.ReportSnapshotRequest:
        return pb.ReportSnapshotRequest(
            shard=self._identity.shard,
            incarnation=self._identity.incarnation,
            generation=self._identity.generation,
            name=order.name,
            version=version,
        )

    def _tell(self, request: pb.ReportSnapshotRequest) -> None:
        with self._lock:
            self._reports[request.name] = request
            while len(self._reports) > _REMEMBERED:
                del self._reports[next(iter(self._reports))]
        try:
            self._report(request)
        except PsError as error:
            log.warning("snapshot could not be reported", snapshot=request.name, reason=str(error))
