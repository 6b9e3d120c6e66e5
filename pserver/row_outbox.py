"""A worker's rows in the memory that it shares with one shard."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pserver.rows_wanted import RowsWanted
from pserver.segment import Segment
from pserver.table_ids import TableIds
from pserver.workspace import Workspace
from psrpc.logs import get_logger
from psrpc.plan import ALIGNMENT_BYTES
from psrpc.tables import Rows

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
        have no room there: then nothing was left."""
        places, at = [], 0
        for table, _ in ids:
            places.append(at)
            at += -(-rows[table].values.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
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
            # A worker on the host's processor has summed them up right there.
            if self._segment.offset_of(values) != start + place:
                box = self._box[place : place + values.nbytes].view(np.float32)
                np.copyto(box.reshape(values.shape), values)
        return [start + place for place in places]

    def places(self, wanted: RowsWanted) -> list[int] | None:
        """Where the arrays lie that wait for rows; None if one is elsewhere, as those of an
        evaluation are."""
        places = [self._segment.offset_of(wanted.into[table]) for table, _ in wanted.pairs]
        found = [place for place in places if place is not None]
        return found if len(found) == len(places) else None
