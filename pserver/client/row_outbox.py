"""A worker's rows in the memory that it shares with a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pserver.core.rows_wanted import RowsWanted
from pserver.core.table_ids import TableIds
from pserver.transport.segment import Segment
from pserver.transport.workspace import Workspace
from psrpc.core.plan import aligned_nbytes
from psrpc.core.tables import Rows
from psrpc.ops.logs import get_logger

NDArray = npt.NDArray[np.float32]

log = get_logger()


class RowOutbox:
    """Copies row gradients to where the shard reads them, and locates the arrays for pulled rows.

    Not thread-safe; different shards use disjoint memory.
    """

    def __init__(self, workspace: Workspace, shard: int, peer: str) -> None:
        assert workspace.segment is not None
        self._segment: Segment = workspace.segment
        self._box = workspace.row_outbox[shard]
        self._peer = peer
        self._logged = False

    def leave(self, ids: TableIds, rows: Mapping[int, Rows]) -> list[int] | None:
        """Copies the gradients of ``ids`` to the segment, unless they lie there already; returns
        the byte offset of each table's, or None, without copying, if they do not fit."""
        present = self._offsets([rows[table].values for table, _ in ids])
        if present is not None:
            return present
        places, at = [], 0
        for table, _ in ids:
            places.append(at)
            at += aligned_nbytes(rows[table].values.nbytes)
        if at > self._box.nbytes:
            if not self._logged:
                self._logged = True
                why = f"{at} bytes of row gradients; there is room for {self._box.nbytes}"
                log.info("some batches go over the network", peer=self._peer, why=why)
            return None
        start = self._segment.offset_of(self._box)
        assert start is not None
        for place, (table, _) in zip(places, ids, strict=True):
            values = rows[table].values
            box = self._box[place : place + values.nbytes].view(np.float32)
            np.copyto(box.reshape(values.shape), values)
        return [start + place for place in places]

    def places(self, wanted: RowsWanted) -> list[int] | None:
        """Returns the byte offsets of the destination arrays in the segment; None if one is outside
        it, as in an evaluation."""
        return self._offsets([wanted.into[table] for table, _ in wanted.pairs])

    def _offsets(self, arrays: Sequence[NDArray]) -> list[int] | None:
        places = [self._segment.offset_of(array) for array in arrays]
        inside = [place for place in places if place is not None]
        return inside if len(inside) == len(places) else None
