"""Where the rows of batches are received: two areas, taken in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pserver.core.table_ids import RowsWanted
from psrpc.core.plan import aligned_empty, aligned_nbytes
from psrpc.core.tables import Rows, TableSpec
from psrpc.ops.logs import get_logger
from psrpc.ops.threads import BLOCK, in_lanes
from worker.embedding.rows import ByRow, RowsNeeded, RowValues

_FEW = 64
"""Rows that are so few are summed up one by one, where that takes fewer calls of NumPy."""


log = get_logger()

HEADROOM = 1.5
"""An area has room for so many times the rows of a first batch."""


@dataclass(eq=False)
class ReceivedRows:
    """The rows of one batch, and where they are received.

    Attributes:
        values: of each table, float32 ``[n, width]``, where n is at least 1; aligned.
        versions: of each shard, the version that its part has; set by who has received it.
    """

    needed: RowsNeeded
    values: tuple[RowValues, ...] = field(repr=False)
    versions: tuple[int, ...] = ()

    def wanted(self, shard: int, *, rows_only: bool = False) -> RowsWanted:
        """What to ask ``shard`` for."""
        parts = self.needed.on_shard(shard)
        return RowsWanted(
            {table: self.needed.ids[table][part] for table, part in parts.items()},
            {table: self.values[table][part] for table, part in parts.items()},
            rows_only,
        )


class RowSets:
    """Gives out places for rows. One thread uses it.

    Each is good until the second call after: those of a batch may be in use while the next batch's
    are received. Rows that do not fit their area have memory of their own.
    """

    def __init__(
        self, tables: Sequence[TableSpec], areas: Sequence[npt.NDArray[np.uint8]] = ()
    ) -> None:
        """``areas`` are uint8, each starts on a 64-byte boundary; none: all memory is their own."""
        self._tables = tables
        self._areas = [area for area in areas if area.size] or [np.empty(0, np.uint8)]
        self._turn = 0
        self._told = not areas

    def place(self, needed: RowsNeeded) -> ReceivedRows:
        """Where the rows of a batch go."""
        area = self._areas[self._turn % len(self._areas)]
        self._turn += 1
        values: list[RowValues] = []
        start = 0
        for table, ids in zip(self._tables, needed.ids, strict=True):
            # A row that is there even if there is no id: what is dropped is gathered from it.
            shape = (max(1, ids.size), table.width)
            nbytes = shape[0] * shape[1] * 4
            if start + nbytes <= area.size:
                flat = area[start : start + nbytes].view(np.float32)
                start += aligned_nbytes(nbytes)
            else:
                self._tell(area, needed)
                flat = aligned_empty(shape[0] * shape[1], "float32")
            if not ids.size:
                flat.fill(0)
            values.append(flat.reshape(shape))
        return ReceivedRows(needed, tuple(values))

    def _tell(self, area: npt.NDArray[np.uint8], needed: RowsNeeded) -> None:
        if not self._told:
            self._told = True
            log.info(
                "the rows of some batches go over the network",
                nbytes=rows_nbytes(self._tables, needed),
                room=area.nbytes,
                why="a batch needs more rows than the first one, by which memory was shared",
            )


def rows_nbytes(tables: Sequence[TableSpec], needed: RowsNeeded) -> int:
    """Bytes of the rows of a batch, as they lie in an area."""
    return sum(
        aligned_nbytes(max(1, ids.size) * table.width * 4)
        for table, ids in zip(tables, needed.ids, strict=True)
    )


class RowSums:
    """Gives each shard its part of the gradients of rows. One thread uses it.

    What it gives is good until the next call. Where boxes of shared memory are given, sums are made
    there, for the shard to read (:class:`pserver.client.row_outbox.RowOutbox`); what does not fit,
    or without boxes, has memory of its own."""

    def __init__(
        self, tables: Sequence[TableSpec], boxes: Sequence[npt.NDArray[np.uint8]] = ()
    ) -> None:
        """``boxes``: by shard, uint8 from a 64-byte boundary."""
        self._tables = tables
        self._boxes = boxes
        self._own: dict[tuple[int, int], npt.NDArray[np.float32]] = {}

    def sum(
        self, needed: RowsNeeded, orders: Sequence[ByRow], gradients: Sequence[RowValues]
    ) -> tuple[Mapping[int, Rows], ...] | None:
        """What each shard gets, by the index of the table; None if a sum is not finite.

        Args:
            gradients: of each table, float32 ``[ids, width]``, one for each id of the batch.
        """
        parts: list[dict[int, Rows]] = []
        for shard in range(len(needed.cuts[0]) - 1):
            mine: dict[int, Rows] = {}
            at = 0
            for table, part in needed.on_shard(shard).items():
                shape = (part.stop - part.start, self._tables[table].width)
                into = self._room(shard, table, at, shape)
                at += aligned_nbytes(into.nbytes)
                if not sum_rows(gradients[table], orders[table], part, into):
                    return None
                mine[table] = Rows(needed.ids[table][part], into)
            parts.append(mine)
        return tuple(parts)

    def _room(self, shard: int, table: int, at: int, shape: tuple[int, int]) -> RowValues:
        size = shape[0] * shape[1]
        nbytes = 4 * size
        if self._boxes and at + nbytes <= self._boxes[shard].size:
            return self._boxes[shard][at : at + nbytes].view(np.float32).reshape(shape)
        own = self._own.get((shard, table))
        if own is None or own.size < size:
            own = self._own[shard, table] = aligned_empty(size, "float32")
        return own[:size].reshape(shape)


def not_finite(
    needed: RowsNeeded, orders: Sequence[ByRow], gradients: Sequence[RowValues]
) -> tuple[int, int] | None:
    """The index of a table and an id with a gradient that is not finite; None where only a sum is
    not. ``gradients`` are as :meth:`RowSums.sum` takes them; without ``orders``, by row."""
    for table, values in enumerate(gradients):
        bad: npt.NDArray[np.bool_] = np.logical_not(np.isfinite(values).all(axis=1))
        found = np.flatnonzero(
            bad[orders[table].order] if orders else bad[: len(needed.ids[table])]
        )
        if len(found):
            row = found[0]
            if orders:
                row = np.searchsorted(orders[table].starts, row, side="right") - 1
            return table, int(needed.ids[table][row])
    return None


def sum_rows(gradients: RowValues, by: ByRow, part: slice, into: RowValues) -> bool:
    """Writes to ``into``, ``[n, width]``, the sums of the rows ``part``, each in the order of the
    batch; whether all of them are finite.

    Args:
        gradients: ``[ids, width]``, one for each id of the batch.
    """
    finite = []

    def work(_lane: int, lane: slice) -> None:
        rows = slice(part.start + lane.start, part.start + lane.stop)
        finite.append(_sum(gradients, by, rows, into[lane]))

    in_lanes(len(into), into.itemsize * into.shape[1], work)
    return all(finite)


def _sum(gradients: RowValues, by: ByRow, rows: slice, into: RowValues) -> bool:
    starts = by.starts[rows]
    counts = by.starts[rows.start + 1 : rows.stop + 1] - starts
    finite = True
    step = max(1, BLOCK // into.shape[1])
    # The first of each row; most have no other.
    for start in range(0, len(into), step):
        block = into[start : start + step]
        first = by.order[starts[start : start + step]]
        np.take(gradients, first, axis=0, out=block, mode="clip")
        finite = finite and bool(np.isfinite(block).all())
    several, number = np.flatnonzero(counts > 1), 1
    with np.errstate(over="ignore", invalid="ignore"):
        # The next gradient of all rows that have one, while they are many, or have few more; then
        # row by row. Both add in the order of the batch, so that a sum does not depend on the rows
        # which are summed up with it.
        while len(several) > _FEW or 0 < len(several) >= counts[several].max() - number:
            sums = into[several]
            sums += gradients[by.order[starts[several] + number]]
            into[several] = sums
            finite = finite and bool(np.isfinite(sums).all())
            number += 1
            several = several[counts[several] > number]
        for row in several:
            rest = gradients[by.order[starts[row] + number : starts[row] + counts[row]]]
            rest[0] += into[row]
            # Along the rows NumPy adds one after the other, but numbers in a line in pairs.
            into[row] = rest.sum(axis=0) if rest.shape[1] > 1 else np.add.accumulate(rest)[-1]
            finite = finite and bool(np.isfinite(into[row]).all())
    return finite
