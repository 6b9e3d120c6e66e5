"""Invariants of embedding tables: their rows are of one state with the arenas, everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from pserver.core.requests import RestoredState, Snapshot, Values
from pserver.core.table_ids import TableIds
from pserver.snapshots.row_files import fill_tables
from pserver.tables.tables import Tables
from psrpc.checkpoint.checkpoint import read_manifest
from psrpc.checkpoint.rows_chain import load_rows
from psrpc.core.shard_reports import SnapshotReport
from psrpc.files.storage import Storage
from tests.sim.network import RUN_DIR
from tests.sim.table_witness import (
    COLUMNS,
    INITIAL,
    MIN_COUNT,
    MOMENTUM,
    PAIR,
    RARE,
    RECENT,
    SEEN,
    SHARED,
    VELOCITY,
    Contents,
    contents,
    contents_now,
)
from tests.sim.witness import UNIT

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

NDArray = npt.NDArray[Any]

EXACT = 1e-3
"""A record more or less is a difference of 1; the weights of a round are rounded."""

HALF = 0.5
"""An entry of the arenas is above this once its record was trained."""


class TableBook:
    """Compares rows with arenas and applied-sets, and what is read with what was written."""

    def __init__(self, cluster: Cluster, fail: Callable[[str], NoReturn]) -> None:
        """``fail`` raises Violation."""
        self._cluster = cluster
        self._options = cluster.options
        self._witness = cluster.witness
        self._fail = fail
        self._written: dict[str, tuple[Contents, ...]] = {}
        """What a shard held when it was frozen, by the SHA-256 of the last part of its rows."""

    # -- a shard ---------------------------------------------------------------------------------

    def check_held(
        self, who: object, shard: int, tables: Tables, part: NDArray, trained: NDArray, updates: int
    ) -> None:
        """The rows of a shard say the same as ``part`` of its arenas, unless it has none, as its
        applied-set (``trained``, ``[rows]`` of the witness) and as the number of its updates."""
        if tables.specs:
            self._agree(who, shard, contents_now(tables), part, trained, updates)

    def check_cut(
        self, who: object, shard: int, snapshot: Snapshot, part: NDArray, trained: NDArray
    ) -> tuple[Contents, ...] | None:
        """The same of a snapshot; returns its rows, if it has them. One that is not written has
        none."""
        if snapshot.tables is None:
            return None
        held = tuple(contents(table) for table in snapshot.tables.tables)
        self._agree(who, shard, held, part, trained, snapshot.slots.iterations)
        return held

    def _agree(
        self,
        who: object,
        shard: int,
        held: Sequence[Contents],
        part: NDArray,
        trained: NDArray,
        updates: int,
    ) -> None:
        witness = self._witness
        mask = trained[: witness.records] > HALF
        ids, counts = witness.tables.seen(mask, shard)
        rows = held[SEEN].rows
        if not np.array_equal(rows.ids, ids):
            self._fail(f"{who} has rows {rows.ids.tolist()}; its applied-set has {ids.tolist()}")
        found = self._sums(held[SEEN], INITIAL)
        if len(ids) and np.abs(found - counts[:, None] * COLUMNS).max() > EXACT:
            self._fail(f"{who} has trained rows {found.tolist()}; expected {counts.tolist()}")
        pair = held[PAIR].rows
        if not np.array_equal(pair.ids, witness.tables.ids[shard].single[: min(1, updates)]):
            self._fail(f"{who} has {len(pair.ids)} rows of the pair after {updates} updates")
        if len(pair.ids) and len(part) and (_plus(witness.rows, part) + pair.values[0]).any():
            self._fail(f"{who} has a row that is torn from the arenas")
        if len(pair.ids) and pair.counts[0] != updates:
            self._fail(f"{who} has counted {pair.counts[0]} updates of a row; {updates} were made")
        if len(held) > RARE:
            self._check_rare(who, held[RARE], updates)
        if len(held) > RECENT:
            most = -(-self._options.most_rows // self._options.shards)
            if len(held[RECENT].rows.ids) > most:
                self._fail(f"{who} has {len(held[RECENT].rows.ids)} rows; at most {most}")

    def _check_rare(self, who: object, held: Contents, updates: int) -> None:
        rows, counts = held.rows, held.candidates.counts
        if updates < MIN_COUNT:
            if len(rows.ids) or counts.sum() != updates:
                self._fail(f"{who} has counted {counts.tolist()} of {updates} updates of a rare id")
            return
        sums = self._sums(held, np.float32(0))
        expected = updates - MIN_COUNT + 1
        if (
            rows.counts.tolist() != [updates]
            or len(counts)
            or np.abs(sums - expected).max() > EXACT
        ):
            self._fail(
                f"{who} has a rare row {sums.tolist()} of {rows.counts.tolist()} updates; expected"
                f" {expected} of {updates}"
            )

    def _sums(self, held: Contents, initial: np.float32) -> NDArray:
        """``[n, width]``: the sum of all updates of each row."""
        sums = held.rows.values - initial
        if self._options.momentum:
            sums = (1 - MOMENTUM) * sums + MOMENTUM * held.rows.slots[VELOCITY]
        return sums

    # -- what workers receive --------------------------------------------------------------------

    def check_answer(
        self, who: object, shard: int, wanted: TableIds, values: Values, part: NDArray
    ) -> None:
        """Rows that came are of the same version as ``part`` of the arenas."""
        if not wanted:
            return
        rows = dict(zip((table for table, _ in wanted), values.rows, strict=True))
        ids = dict(wanted)
        if (_plus(self._witness.rows, part) + rows[PAIR][0]).any():
            self._fail(f"{who} received a row that is torn from the arenas of shard {shard}")
        witness = self._witness
        entries = part[: witness.records]
        own = witness.tables.ids[shard].own
        there, at, of = np.intersect1d(own, ids[SEEN], return_indices=True)
        trained = (entries[at] > HALF).astype(np.float32)
        found = rows[SEEN] - INITIAL
        if np.abs(found[of] - trained[:, None] * COLUMNS).max() > EXACT:
            self._fail(
                f"{who} received rows {there.tolist()} of shard {shard} as {found[of].tolist()};"
                f" their records are {trained.tolist()} in its arenas"
            )
        if self._options.momentum:
            # Those that are trained more than once.
            return
        for n, shared in enumerate(witness.tables.ids[shard].shared):
            expected = entries[n::SHARED].sum() * COLUMNS
            for row in found[ids[SEEN] == shared]:
                if np.abs(row - expected).max() > EXACT:
                    self._fail(
                        f"{who} received row {shared} of shard {shard} as {row.tolist()}; its"
                        f" arenas have {expected.tolist()}"
                    )

    # -- checkpoints -----------------------------------------------------------------------------

    def written(self, report: SnapshotReport, held: tuple[Contents, ...] | None) -> None:
        """A shard has written what it held."""
        if held is None or not report.file.rows:
            return
        self._written[report.file.rows[-1].sha256] = held
        counts = self._cluster.counts
        counts["rows continued" if len(report.file.rows) > 1 else "rows written whole"] += 1

    def watched(
        self, restored: RestoredState, checkpoint: str, shard: int, disk: Storage
    ) -> RestoredState:
        """``restored``, whose rows are compared with those that were written."""
        load = restored.load_rows
        if load is None:
            return restored

        def load_and_compare(tables: Tables) -> None:
            load(tables)
            self._compare(checkpoint, shard, tables, disk)
            self._cluster.counts["rows restored"] += 1

        return replace(restored, load_rows=load_and_compare)

    def check_committed(self, checkpoint: str) -> None:
        """Rows can be read back as they were frozen."""
        if not self._options.tables or self._cluster.faults.fired["rot"]:
            return
        for shard in range(self._options.shards):
            self.read(checkpoint, shard)

    def read(self, checkpoint: str, shard: int) -> Tables:
        """A shard's tables as a checkpoint has them, compared with those that were written."""
        disk = self._cluster.view()
        tables = Tables(self._witness.plan, shard)
        fill_tables(
            tables, load_rows(RUN_DIR / checkpoint, self._witness.plan, shard, storage=disk)
        )
        self._compare(checkpoint, shard, tables, disk)
        return tables

    def _compare(self, checkpoint: str, shard: int, tables: Tables, disk: Storage) -> None:
        manifest = read_manifest(Path(RUN_DIR / checkpoint), disk)
        (file,) = (file for file in manifest.files if file.shard == shard)
        written = self._written[file.rows[-1].sha256]
        for spec, one, other in zip(tables.specs, contents_now(tables), written, strict=True):
            different = one.differs(other)
            if different:
                self._fail(
                    f"{checkpoint} has table {spec.name!r} of shard {shard} with {different}"
                )

    # -- the end ---------------------------------------------------------------------------------

    def check_trained(
        self, who: object, shard: int, tables: Tables, part: NDArray, trained: NDArray
    ) -> None:
        """Rows agree with records that were ``trained``, by however many updates."""
        held = contents_now(tables)
        self._agree(who, shard, held, part, trained, int(held[PAIR].rows.counts.sum()))
        counts = self._cluster.counts
        counts["rows evicted"] += sum(table.evicted for table in tables.tables)
        counts["candidates dropped"] += sum(t.admission.dropped for t in tables.tables)

    def check_bits(self, who: object, tables: Tables, final: Tables) -> None:
        """Sync: rows end with the bits that they have without faults."""
        for spec, one, other in zip(
            tables.specs, contents_now(tables), contents_now(final), strict=True
        ):
            different = one.differs(other)
            if different:
                self._fail(
                    f"{who} ends with another table {spec.name!r} than without faults: {different}"
                )


def _plus(rows: int, part: NDArray) -> NDArray:
    return part[rows : rows + UNIT]
