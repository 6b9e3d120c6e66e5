"""Writes the rows that a shard's tables have evicted since a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path, PurePosixPath

from pserver.core.fence import ShardIdentity
from pserver.core.requests import Snapshot
from pserver.snapshots.row_files import rows_header
from pserver.tables.part import TablePart
from psrpc.checkpoint.rows_file import TableRows, evicted_file_name, write_rows_file
from psrpc.checkpoint.shard_file import NDArray, WrittenFile
from psrpc.core.commands import SnapshotOrder
from psrpc.core.plan import Plan
from psrpc.files.storage import DISK, Storage

_REMEMBERED = 4
"""Number of newest checkpoints that a shard remembers having written. More than one, because the
newest may still fail."""


class EvictedFiles:
    """Writes one shard's files of evicted rows. One thread uses it.

    The order for a snapshot names the newest committed checkpoint as its base. If this object wrote
    that base in the same generation, the base contains all rows evicted up to then: this object
    writes only later ones, and the tables drop the earlier ones. Otherwise it writes all evicted
    rows that the tables keep. So if a checkpoint fails, the next one contains its rows, too."""

    def __init__(
        self, identity: ShardIdentity, plan: Plan, run_id: str, storage: Storage = DISK
    ) -> None:
        self._identity = identity
        self._plan = plan
        self._run_id = run_id
        self._storage = storage
        self._kept = any(table.keep_evicted for table in plan.tables_on(identity.shard))
        self._versions: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Checkpoint name -> its generation, and the last version of each table. The generation
        matters because another one may use the same version for another update."""

    def write(
        self, order: SnapshotOrder, snapshot: Snapshot, directory: Path
    ) -> WrittenFile | None:
        """Writes the evicted rows into ``directory``. Returns None if there are none.

        Raises:
            CheckpointError: the operating system refused.
        """
        if not self._kept:
            return None
        assert snapshot.tables is not None  # there are tables
        frozen = snapshot.tables.tables
        generation = snapshot.values.generation
        known, versions = self._versions.get(PurePosixPath(order.base).name, (None, ()))
        if known != generation:
            versions = (-1,) * len(frozen)
        parts = []
        for table, version in zip(frozen, versions, strict=True):
            parts.append(table.evicted(version))
            with snapshot.lock:
                table.let_go_evicted(version)
        written = None
        if any(map(len, parts)):
            written = self._write(order, snapshot, directory, parts)
        self._versions[order.name] = generation, tuple(table.version for table in frozen)
        while len(self._versions) > _REMEMBERED:
            del self._versions[next(iter(self._versions))]
        return written

    def _write(
        self, order: SnapshotOrder, snapshot: Snapshot, directory: Path, parts: list[TablePart]
    ) -> WrittenFile:
        tables = [
            TableRows(
                spec,
                len(part),
                {name: array.shape[1] for name, array in part.slots.items()},
                partial(_read, part),
            )
            for spec, part in zip(self._plan.tables, parts, strict=True)
        ]
        header = rows_header(
            self._identity,
            self._plan,
            self._run_id,
            order,
            snapshot,
            part=0,
            after="",
            slots=[table.slots for table in tables],
            rows=[table.rows for table in tables],
        )
        name = evicted_file_name(self._identity.shard, self._plan.shards)
        return write_rows_file(directory / name, header, tables, self._storage)


def _read(part: TablePart, column: str, start: int, stop: int) -> NDArray:
    kind, _, slot = column.partition("/")
    whole: NDArray = part.slots[slot] if slot else getattr(part, kind)
    return whole[start:stop]
