"""The memory of one worker for all tensors that it sends and receives, allocated once."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import value_dtype
from pserver.core.table_ids import TableIds
from pserver.transport.segment import HANDSHAKE_BYTES, SLOTS, Segment, SegmentUnavailable
from psrpc.core.encoding import Encoding, Gradient
from psrpc.core.plan import ALIGNMENT_BYTES, Plan, aligned_nbytes
from psrpc.core.tables import MAX_IDS, Rows
from psrpc.ops.logs import get_logger

NDArray = npt.NDArray[Any]

log = get_logger()

_ROWS_SLACK_BYTES = 16 << 10
_MESSAGE_BYTES = 16 << 10
_IDS_BYTES = 2 << 20
_LEAST_IDS_BYTES = 256 << 10


class Workspace:
    """Two parameter sets to pull into and, in shared memory, an outbox for gradients.

    Arrays start on a 64-byte boundary; arrays of a page or more start on a page boundary. A worker
    that has to give up its segment closes the workspace and makes another.

    Attributes:
        sets: two mappings of arena name -> ``[arena length]``, initially zeros, in the arena's
            dtype, but float32 arenas of trainable variables in the dtype of ``wire``. A shard's
            part may start at any element.
        outbox: for each shard, arena name -> uint8 with room for that shard's part of a gradient in
            any encoding. Empty if memory is private.
        row_sets: two areas, uint8 ``[rows_nbytes or more]``, to pull rows into.
        row_outbox: for each shard, uint8 with room for its part of the row gradients if ids are
            spread about evenly over shards. Empty if memory is private.
        mailboxes: for each shard, uint8 for messages. Empty if memory is private.
        segment: the shared segment that contains these arrays; None if memory is private.
        why: why memory is private; empty if it is shared.
    """

    def __init__(
        self, plan: Plan, wire: Encoding = "plain", shared: bool = True, rows_nbytes: int = 0
    ) -> None:
        """``rows_nbytes`` is the room for the rows of a batch, over all tables and shards. Rows of
        larger batches travel in chunks."""
        layout = _Layout(plan, wire, min(rows_nbytes, _most_rows_nbytes(plan)))
        self.segment: Segment | None = None
        self.why = "" if shared else "it is switched off"
        if shared:
            try:
                if plan.shards > SLOTS:
                    raise SegmentUnavailable(f"there are {plan.shards} shards; expected <= {SLOTS}")
                self.segment = Segment.create(layout.nbytes)
            except SegmentUnavailable as unavailable:
                self.why = str(unavailable)
        memory = self.segment.bytes if self.segment else _private(layout.sets_nbytes)
        first, second = (
            {
                a.name: memory[places[a.name]].view(value_dtype(a, wire))[: a.length]
                for a in plan.arenas
            }
            for places in layout.sets
        )
        self.sets = (first, second)
        one, other = (memory[place] for place in layout.row_sets)
        self.row_sets = (one, other)
        self.row_outbox: tuple[NDArray, ...] = ()
        self.outbox: tuple[dict[str, NDArray], ...] = ()
        self.mailboxes: tuple[NDArray, ...] = ()
        if self.segment:
            self.outbox = tuple(
                {name: memory[place] for name, place in places.items()} for places in layout.outbox
            )
            self.row_outbox = tuple(memory[place] for place in layout.row_outbox)
            self.mailboxes = tuple(memory[place] for place in layout.mailboxes)

    def close(self) -> None:
        """Stops offering the segment. Its memory is freed when its last array is gone."""
        if self.segment:
            self.segment.close()


class ShardOutbox:
    """One shard's part of a worker's shared memory. Not thread-safe, but the parts of different
    shards are disjoint."""

    def __init__(self, workspace: Workspace, segment: Segment, shard: int, peer: str) -> None:
        self.mailbox = workspace.mailboxes[shard]
        self._segment = segment
        self._boxes = workspace.outbox[shard]
        self._places = self.offsets(self._boxes.values()) or []
        self._row_box = workspace.row_outbox[shard]
        self._peer = peer
        self._logged = False

    def leave(self, gradient: Gradient) -> list[int]:
        """Copies a gradient to the outbox, where the shard reads it. Returns the offsets of its
        arenas, in the plan's order."""
        for name, box in self._boxes.items():
            at = 0
            for part in gradient[name].parts:
                np.copyto(box[at : at + part.nbytes], part.view(np.uint8))
                at += part.nbytes
        return self._places

    def leave_rows(self, ids: TableIds, rows: Mapping[int, Rows]) -> list[int] | None:
        """Copies the row gradients of ``ids`` to the segment, unless they lie there already.
        Returns their byte offset for each table. If they do not fit, copies nothing and returns
        None."""
        present = self.offsets(rows[table].values for table, _ in ids)
        if present is not None:
            return present
        places, at = [], 0
        for table, _ in ids:
            places.append(at)
            at += aligned_nbytes(rows[table].values.nbytes)
        if at > self._row_box.nbytes:
            if not self._logged:
                self._logged = True
                why = f"{at} bytes of row gradients; there is room for {self._row_box.nbytes}"
                log.info("some batches go over the network", peer=self._peer, why=why)
            return None
        start = self._segment.offset_of(self._row_box)
        assert start is not None
        for place, (table, _) in zip(places, ids, strict=True):
            values = rows[table].values
            box = self._row_box[place : place + values.nbytes].view(np.float32)
            np.copyto(box.reshape(values.shape), values)
        return [start + place for place in places]

    def offsets(self, arrays: Iterable[NDArray]) -> list[int] | None:
        """Returns the byte offset of each array in the segment; None if an array is outside it, for
        example in an evaluation."""
        places = [self._segment.offset_of(array) for array in arrays]
        inside = [place for place in places if place is not None]
        return inside if len(inside) == len(places) else None


def segment_nbytes(plan: Plan) -> int:
    """Returns the size of the largest segment that a worker can have, in bytes. No wire encoding
    needs more than plain, and no batch has more ids than messages can name."""
    return _Layout(plan, "plain", _most_rows_nbytes(plan)).nbytes


def _most_rows_nbytes(plan: Plan) -> int:
    return plan.row_shards * MAX_IDS * max((table.width for table in plan.tables), default=0) * 4


class _Layout:
    """Places of all arrays as slices, in bytes from the start of the memory; the sets come first.

    Attributes:
        sets: two mappings of arena name -> place.
        outbox: for each shard, arena name -> place.
        row_sets, row_outbox: two places; and one place per shard.
        mailboxes: one place per shard.
        sets_nbytes, nbytes: bytes up to the end of the sets, and in total.
    """

    def __init__(self, plan: Plan, wire: Encoding, rows_nbytes: int) -> None:
        self.nbytes = HANDSHAKE_BYTES
        self.sets = [
            {a.name: self._place(a.length * value_dtype(a, wire).itemsize) for a in plan.arenas}
            for _ in range(2)
        ]
        room = rows_nbytes and rows_nbytes + _ROWS_SLACK_BYTES
        self.row_sets = [self._place_rows(room) for _ in range(2)]
        self.sets_nbytes = self.nbytes
        # Messages that contain ids are long. Messages that do not fit are sent by gRPC.
        ids = max(_LEAST_IDS_BYTES, _IDS_BYTES // plan.row_shards) if plan.tables else 0
        self.mailboxes = [self._place(_MESSAGE_BYTES + ids) for _ in range(plan.shards)]
        # Shards' parts are separate arrays, since a boundary between parts need not be aligned.
        self.outbox = [
            {a.name: self._place(a.shard_length(k) * a.itemsize) for a in plan.arenas}
            for k in range(plan.shards)
        ]
        # Shards get slightly different numbers of the ids of a batch.
        share = rows_nbytes and rows_nbytes // plan.row_shards * 5 // 4 + _ROWS_SLACK_BYTES
        self.row_outbox = [
            self._place_rows(share if plan.tables_on(k) else 0) for k in range(plan.shards)
        ]

    def _place_rows(self, nbytes: int) -> slice:
        return self._place(nbytes) if nbytes else slice(0, 0)

    def _place(self, nbytes: int) -> slice:
        """Reserves at least ``nbytes``.

        Reserves at least one aligned unit: an empty slice has no offset, and int8 with its scale is
        longer than a single float32."""
        page = mmap.PAGESIZE
        start = _round_up(self.nbytes, page if nbytes >= page else ALIGNMENT_BYTES)
        self.nbytes = start + aligned_nbytes(max(nbytes, 1))
        return slice(start, self.nbytes)


def _round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def _private(nbytes: int) -> NDArray:
    """Returns ``[nbytes]`` uint8 zeros that start on a page boundary."""
    raw = np.zeros(nbytes + mmap.PAGESIZE, np.uint8)
    skip = -raw.ctypes.data % mmap.PAGESIZE
    return raw[skip : skip + nbytes]
