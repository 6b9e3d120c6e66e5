"""Where the rows of batches are received: two areas, taken in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pserver.core.rows_wanted import RowsWanted
from psrpc.core.plan import aligned_empty, aligned_nbytes
from psrpc.core.tables import TableSpec
from psrpc.ops.logs import get_logger
from worker.embedding.rows import RowsNeeded, RowValues

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
