"""The memory that receives the rows of batches: two areas, used in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pserver.core.table_ids import RowsWanted
from psrpc.core.plan import aligned_empty, aligned_nbytes
from psrpc.core.tables import Rows, TableSpec
from psrpc.ops.lanes import BLOCK, in_lanes
from psrpc.ops.logs import get_logger
from worker.embedding.rows import ByRow, RowsNeeded, RowValues

_FEW = 64
"""Up to this many rows are summed one by one, if that takes fewer NumPy calls."""


log = get_logger()

HEADROOM = 1.5
"""An area has room for the rows of the first batch times this."""


@dataclass(eq=False)
class ReceivedRows:
    """The rows of one batch, and the memory that receives them.

    Attributes:
        values: per table its rows, float32 ``[n, width]`` with n at least 1; aligned.
        versions: per shard the version of its part; set by the receiver.
    """

    needed: RowsNeeded
    values: tuple[RowValues, ...] = field(repr=False)
    versions: tuple[int, ...] = ()

    def wanted(self, shard: int, *, rows_only: bool = False) -> RowsWanted:
        """Returns the request to ``shard``."""
        parts = self.needed.on_shard(shard)
        return RowsWanted(
            {table: self.needed.ids[table][part] for table, part in parts.items()},
            {table: self.values[table][part] for table, part in parts.items()},
            rows_only,
        )


class RowSets:
    """Provides memory for rows. One thread uses it.

    Memory stays valid until the call after the next: a step may use the rows of one batch while
    those of the next arrive. Rows that do not fit their area get memory of their own.
    """

    def __init__(
        self, tables: Sequence[TableSpec], areas: Sequence[npt.NDArray[np.uint8]] = ()
    ) -> None:
        """``areas`` are uint8 and start on a 64-byte boundary; without them all rows get own
        memory."""
        self._tables = tables
        self._areas = [area for area in areas if area.size] or [np.empty(0, np.uint8)]
        self._turn = 0
        self._logged = not areas

    def place(self, needed: RowsNeeded) -> ReceivedRows:
        """Returns memory for the rows of a batch."""
        area = self._areas[self._turn % len(self._areas)]
        self._turn += 1
        values: list[RowValues] = []
        start = 0
        for table, ids in zip(self._tables, needed.ids, strict=True):
            # At least one row: the step gathers it for dropped ids.
            shape = (max(1, ids.size), table.width)
            nbytes = shape[0] * shape[1] * 4
            if start + nbytes <= area.size:
                flat = area[start : start + nbytes].view(np.float32)
                start += aligned_nbytes(nbytes)
            else:
                self._log_overflow(area, needed)
                flat = aligned_empty(shape[0] * shape[1], "float32")
            if not ids.size:
                flat.fill(0)
            values.append(flat.reshape(shape))
        return ReceivedRows(needed, tuple(values))

    def _log_overflow(self, area: npt.NDArray[np.uint8], needed: RowsNeeded) -> None:
        if self._logged:
            return
        self._logged = True
        log.info(
            "the rows of some batches go over the network",
            nbytes=rows_nbytes(self._tables, needed),
            room=area.nbytes,
            why="a batch needs more rows than the first one, by which memory was shared",
        )


def rows_nbytes(tables: Sequence[TableSpec], needed: RowsNeeded) -> int:
    """Returns the bytes that the rows of a batch take in an area."""
    return sum(
        aligned_nbytes(max(1, ids.size) * table.width * 4)
        for table, ids in zip(tables, needed.ids, strict=True)
    )


class RowSums:
    """Sums the gradients of rows for each shard. One thread uses it.

    A result is valid until the next call. The sums lie in boxes of shared memory, which the shard
    reads (:class:`pserver.transport.workspace.ShardOutbox`); without boxes, or if they do not fit,
    in own memory.
    """

    def __init__(
        self, tables: Sequence[TableSpec], boxes: Sequence[npt.NDArray[np.uint8]] = ()
    ) -> None:
        """``boxes``: one per shard, uint8 from a 64-byte boundary."""
        self._tables = tables
        self._boxes = boxes
        self._own: dict[tuple[int, int], npt.NDArray[np.float32]] = {}

    def sum(
        self, needed: RowsNeeded, orders: Sequence[ByRow], gradients: Sequence[RowValues]
    ) -> tuple[Mapping[int, Rows], ...] | None:
        """Returns each shard's part by the index of the table; None if a sum is not finite.

        Args:
            gradients: per table float32 ``[ids, width]``, one row for each id of the batch.
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
    """Returns the index of a table and an id whose gradient is not finite; None if only a sum is
    not. ``gradients`` are as in :meth:`RowSums.sum`; without ``orders``, by row."""
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
    """Writes the sums of the rows ``part`` to ``into``, ``[n, width]``, each added in batch order.

    Args:
        gradients: ``[ids, width]``, one for each id of the batch.

    Returns:
        Whether all sums are finite.
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
    # Copies the first gradient of each row; most rows have no other.
    for start in range(0, len(into), step):
        block = into[start : start + step]
        first = by.order[starts[start : start + step]]
        np.take(gradients, first, axis=0, out=block, mode="clip")
        finite = finite and bool(np.isfinite(block).all())
    several, number = np.flatnonzero(counts > 1), 1
    with np.errstate(over="ignore", invalid="ignore"):
        # Adds the next gradient of all rows that have one, while these rows are many or have few
        # more gradients; then continues row by row. Both ways add in batch order, so that a sum
        # does not depend on the other rows.
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
            # NumPy adds sequentially along rows, but pairwise in one dimension.
            into[row] = rest.sum(axis=0) if rest.shape[1] > 1 else np.add.accumulate(rest)[-1]
            finite = finite and bool(np.isfinite(into[row]).all())
    return finite
