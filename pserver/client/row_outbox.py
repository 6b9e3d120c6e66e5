"""A worker's rows in the memory that it shares with one shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pserver.core.table_ids import RowsWanted, TableIds
from pserver.transport.segment import Segment
from pserver.transport.workspace import Workspace
from psrpc.core.plan import aligned_nbytes
from psrpc.core.tables import Rows
from psrpc.ops.logs import get_logger

NDArray = npt.NDArray[np.float32]

log = get_logger()


class RowOutbox:
    """Leaves row gradients where a shard reads them, and finds where it may put rows.

    Not thread-safe, but what belongs to another shard is not touched.
    """

    def __init__(self, workspace: Workspace, shard: int, peer: str) -> None:
        assert workspace.segment is not None
        self._segment: Segment = workspace.segment
        self._box = workspace.row_outbox[shard]
        self._peer = peer
        self._told = False

    def leave(self, ids: TableIds, rows: Mapping[int, Rows]) -> list[int] | None:
        """Where the gradients of each table of ``ids`` lie in the segment, in bytes; None if they
        have no room there: then nothing was left. Those that lie there already stay."""
        there = self._found([rows[table].values for table, _ in ids])
        if there is not None:
            return there
        places, at = [], 0
        for table, _ in ids:
            places.append(at)
            at += aligned_nbytes(rows[table].values.nbytes)
        if at > self._box.nbytes:
            if not self._told:
                self._told = True
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
        """Where the arrays lie that wait for rows; None if one is elsewhere, as those of an
        evaluation are."""
        return self._found([wanted.into[table] for table, _ in wanted.pairs])

    def _found(self, arrays: Sequence[NDArray]) -> list[int] | None:
        places = [self._segment.offset_of(array) for array in arrays]
        found = [place for place in places if place is not None]
        return found if len(found) == len(places) else None
