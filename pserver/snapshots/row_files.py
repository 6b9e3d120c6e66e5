"""Writes the rows of a shard's snapshots: all rows, or only those changed since a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from pserver.core.fence import ShardIdentity
from pserver.core.requests import Snapshot
from pserver.tables.frozen import FrozenTable
from pserver.tables.part import Counted, TablePart
from pserver.tables.tables import Tables
from psrpc.checkpoint.rows_chain import Removed, RowsStep, SavedCandidates
from psrpc.checkpoint.rows_file import (
    RowsHeader,
    TableRows,
    row_nbytes,
    rows_file_name,
    write_rows_file,
)
from psrpc.checkpoint.rows_reader import RowsBlock
from psrpc.checkpoint.shard_file import NDArray, WrittenFile
from psrpc.core.commands import SnapshotOrder
from psrpc.core.plan import Plan
from psrpc.core.tables import TableSpec
from psrpc.files.storage import DISK, Storage
from psrpc.ops.logs import get_logger

log = get_logger()

_RANGE = 1 << 17
"""Number of slots scanned at once while the lock is held, which takes about a millisecond."""

_REMEMBERED = 4
"""Number of newest checkpoints that a shard can continue. More than one, because the newest may
still fail."""


@dataclass(frozen=True)
class _Chain:
    """The files with a checkpoint's rows, all written by this shard. They contain the rows up to
    ``versions``, one version per table. ``nbytes`` is the size of the rows in them."""

    generation: int
    versions: tuple[int, ...]
    files: tuple[WrittenFile, ...]
    nbytes: int


class RowFiles:
    """Writes one shard's files of rows. One thread uses it.

    If this object wrote the order's base checkpoint in the same generation, the new checkpoint
    links the files of the base and adds one with the changes. In the same generation the tables are
    the same and versions have only risen, so the changes are known by version."""

    def __init__(
        self, identity: ShardIdentity, plan: Plan, run_id: str, storage: Storage = DISK
    ) -> None:
        self._identity = identity
        self._plan = plan
        self._run_id = run_id
        self._storage = storage
        self._chains: dict[str, _Chain] = {}
        """Name of a checkpoint -> its chain."""

    def write(
        self, order: SnapshotOrder, snapshot: Snapshot, directory: Path, base: Path | None
    ) -> tuple[WrittenFile, ...]:
        """Writes the snapshot's rows into ``directory``, and links files from ``base``, the
        directory of the checkpoint that the order names. Returns all parts, in order.

        Takes the snapshot's lock for one block at a time, about a millisecond each.

        Raises:
            CheckpointError: the operating system refused.
        """
        assert snapshot.tables is not None
        frozen, lock = snapshot.tables.tables, snapshot.lock
        generation = snapshot.values.generation
        chain = self._chains.get(PurePosixPath(order.base).name)
        rows = None
        if chain is not None and chain.generation == generation:
            rows = self._since(frozen, lock, chain, order.parts)
        if rows is None or base is None or not self._link(chain, base, directory):
            chain = None
            rows = [
                _rows(spec, table, lock, _slots(table, lock, -1))
                for spec, table in zip(self._plan.tables, frozen, strict=True)
            ]
        before = chain.files if chain is not None else ()
        shard, shards = self._identity.shard, self._plan.shards
        header = rows_header(
            self._identity,
            self._plan,
            self._run_id,
            order,
            snapshot,
            part=len(before),
            after=before[-1].sha256 if before else "",
            slots=[table.slots for table in rows],
            rows=[len(table) for table in frozen],
        )
        path = directory / rows_file_name(shard, shards, len(before))
        files = (*before, write_rows_file(path, header, rows, self._storage))
        nbytes = _nbytes(rows) + (chain.nbytes if chain is not None else 0)
        self._chains[order.name] = _Chain(
            generation, tuple(table.version for table in frozen), files, nbytes
        )
        while len(self._chains) > _REMEMBERED:
            del self._chains[next(iter(self._chains))]
        return files

    def _since(
        self,
        frozen: Sequence[FrozenTable],
        lock: AbstractContextManager[object],
        chain: _Chain,
        parts: int,
    ) -> list[TableRows] | None:
        """Returns the changes since ``chain``, or None if all rows should be written again.

        That is so if there are ``parts`` parts already, if removals are not known any more, if the
        new part would have more than half of the bytes of all rows, or if all parts together, which
        a restart has to read, would have more than twice those bytes."""
        if len(chain.files) >= parts:
            return None
        changed = []
        whole = 0
        for spec, table, version in zip(self._plan.tables, frozen, chain.versions, strict=True):
            with lock:
                removed = table.removed_since(version)
            if removed is None:
                return None
            rows = _rows(spec, table, lock, _slots(table, lock, version))
            changed.append(replace(rows, removed=removed))
            whole += len(table) * row_nbytes(spec, rows.slots)
        new = _nbytes(changed)
        return changed if 2 * new <= whole and chain.nbytes + new <= 2 * whole else None

    def _link(self, chain: _Chain | None, base: Path, directory: Path) -> bool:
        """Links all parts of ``chain`` into ``directory``; returns False if that failed. Links the
        last part first, so that a failure leaves no part 0 in the way of a new part 0."""
        assert chain is not None
        try:
            for file in reversed(chain.files):
                self._storage.link(base / file.name, directory / file.name)
        except OSError as error:
            log.info("rows are written whole", reason=f"no link: {error.strerror}")
            return False
        return True


def rows_header(
    identity: ShardIdentity,
    plan: Plan,
    run_id: str,
    order: SnapshotOrder,
    snapshot: Snapshot,
    *,
    part: int,
    after: str,
    slots: Sequence[Mapping[str, int]],
    rows: Sequence[int],
) -> RowsHeader:
    """Returns the header of a file with rows of the snapshot."""
    return RowsHeader(
        shard=identity.shard,
        shards=plan.shards,
        plan_hash=plan.hash.hex(),
        run_id=run_id,
        generation=snapshot.values.generation,
        global_step=order.global_step,
        version=snapshot.values.version,
        part=part,
        after=after,
        tables=plan.tables,
        slots=slots,
        rows=rows,
    )


def fill_tables(tables: Tables, steps: Iterable[tuple[int, RowsStep]]) -> None:
    """Fills empty tables with the rows of a checkpoint, see
    :func:`psrpc.checkpoint.rows_chain.load_rows`. After an error they are empty again.

    Raises:
        CheckpointError: the files are damaged, or of another optimizer.
        ResourceExhausted: out of memory.
    """
    candidates: dict[int, list[SavedCandidates]] = {}
    try:
        for number, step in steps:
            table = tables[number]
            match step:
                case Removed(ids):
                    table.remove(ids)
                case SavedCandidates():
                    candidates.setdefault(number, []).append(step)
                case RowsBlock():
                    table.insert(
                        TablePart(step.ids, step.values, step.slots, step.counts, step.touched)
                    )
        for number, pieces in candidates.items():
            counted = Counted(
                np.concatenate([piece.ids for piece in pieces]),
                np.concatenate([piece.counts for piece in pieces]),
                np.concatenate([piece.touched for piece in pieces]),
            )
            tables[number].load_candidates(counted)
    except BaseException:
        tables.forget()
        raise


def _slots(table: FrozenTable, lock: AbstractContextManager[object], version: int) -> NDArray:
    """Returns the slots of the rows touched after ``version``, int32 ``[n]``."""
    found: list[NDArray] = [np.empty(0, np.int32)]
    for start in range(0, table.slots, _RANGE):
        with lock:
            found.append(table.since(version, start, start + _RANGE))
    return np.concatenate(found)


def _rows(
    spec: TableSpec, table: FrozenTable, lock: AbstractContextManager[object], slots: NDArray
) -> TableRows:
    with lock:
        none = table.block(slots[:0])
    widths = {name: array.shape[1] for name, array in none.slots.items()}
    read = partial(_read, table, lock, slots)
    return TableRows(spec, len(slots), widths, read, candidates=table.candidates)


def _read(
    table: FrozenTable,
    lock: AbstractContextManager[object],
    slots: NDArray,
    column: str,
    start: int,
    stop: int,
) -> NDArray:
    with lock:
        return table.column(column, slots[start:stop])


def _nbytes(tables: Iterable[TableRows]) -> int:
    return sum(
        table.rows * row_nbytes(table.spec, table.slots) + table.removed.nbytes for table in tables
    )
