"""The shard's end of a transport through shared memory: tensors in the worker's segment, short
messages in a mailbox there.

See docs/design/0005-shared-segment.md and docs/design/0012-mailbox.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pserver.core.assembly import Extent, Seen, check_values, value_dtype
from pserver.core.table_ids import TableIds, check_tables, row_extents
from pserver.transport import mailbox
from pserver.transport.attachment import AttachedSegment, attach
from pserver.transport.grpc_stream import read_exchange
from pserver.transport.mailbox import HEAD_BYTES, ShardBox
from pserver.transport.segment import Offer, SegmentUnavailable
from pserver.transport.transport import (
    SENT,
    Acceptor,
    Arrival,
    NDArray,
    Places,
    PulledValues,
    ShardTransport,
)
from pserver.transport.workspace import segment_nbytes
from pserver.wire import streams
from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import ALIGNMENT_BYTES, Plan
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.codec import encode_stream

_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Shared(Arrival):
    """Tensors in an attached segment; the worker does not write there until the push is answered.

    Arenas are not checked for non-finite elements here. The worker has checked them, another
    process of the same user could change them after any check, and reading 64 MB once more costs a
    fifth of a push.

    ``views`` are ``[nbytes] uint8``, aligned, one per extent of an arena. ``rows`` are the same,
    one per table in table order."""

    views: Sequence[NDArray]
    rows: Sequence[NDArray] = ()

    def in_place(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        tables: int,  # noqa: ARG002
    ) -> tuple[Mapping[str, NDArray], Sequence[NDArray]]:
        """See :class:`Arrival`."""
        named = zip(extents[: len(self.views)], self.views, strict=True)
        return {plan.arenas[extent.arena].name: view for extent, view in named}, self.rows

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,  # noqa: ARG002
    ) -> None:
        """See :class:`Arrival`."""
        arrays, row_views = self.in_place(plan, extents, len(self.rows))
        for name, view in arrays.items():
            np.copyto(into[name].view(np.uint8), view)
        for array, view in zip((rows or {}).values(), row_views, strict=True):
            np.copyto(array.reshape(-1).view(np.uint8), view)


class ShardMemory(ShardTransport):
    """The shard's end of a transport through shared memory."""

    def __init__(
        self,
        call: ShardTransport,
        segment: AttachedSegment,
        box: ShardBox | None,
        plan: Plan,
        shard: int,
    ) -> None:
        """Args:
        call: the shard's end of the gRPC stream, for messages and tensors that do not fit into
            shared memory.
        box: the mailbox; None if all messages go through the call.
        """
        self._call = call
        self._segment: AttachedSegment | None = segment
        self._box = box
        self._plan = plan
        self._shard = shard
        self._sizes: dict[Encoding, list[tuple[int, int]]] = {}
        self._in_box = False
        """Whether the last request came through the mailbox."""
        self._over = False

    def receive(self) -> tuple[pb.ExchangeHeader, Arrival] | None:
        """See :class:`ShardTransport`."""
        message: bytes | None = b""
        if self._box is not None:
            message = self._box.receive(lambda: self._over)
            if message is None:
                return None
        self._in_box = bool(message)
        request = read_exchange(iter((message,))) if message else self._call.receive()
        if request is None or not request[0].push_at:
            return request
        header = request[0]
        sizes = [(extent.nbytes, ALIGNMENT_BYTES) for extent in header.push.extents]
        views = self._views(header.push_at, sizes, "push")
        cut = max(0, len(views) - len(header.push.rows))
        return header, Shared(views[:cut], views[cut:])

    def places(self, header: pb.ExchangeHeader, rows: TableIds, rows_only: bool) -> Places:
        """See :class:`ShardTransport`."""
        if not header.pull_at:
            return SENT
        if not rows and not rows_only:
            return Places(self._views(header.pull_at, self._arena_sizes(header), "pull"))
        check_tables(self._plan, rows)
        sizes = [] if rows_only else self._arena_sizes(header)
        of_rows = [(extent.nbytes, _ELEMENT_BYTES) for extent in row_extents(self._plan, rows)]
        views = self._views(header.pull_at, [*sizes, *of_rows], "pull")
        into = (
            view.view(np.float32).reshape(len(ids), self._plan.tables[table].width)
            for view, (table, ids) in zip(views[len(sizes) :], rows, strict=True)
        )
        return Places(views[: len(sizes)], tuple(into))

    def answer(self, answer: pb.ExchangeAnswer, pulled: PulledValues | None) -> Iterable[bytes]:
        """See :class:`ShardTransport`."""
        if pulled is not None and pulled.places.arenas is not None:
            # The engine has written the rows there already.
            values = pulled.values
            arenas = self._plan.arenas if values.arrays else ()
            for view, arena in zip(pulled.places.arenas, arenas, strict=True):
                np.copyto(view, values.arrays[arena.name].view(np.uint8))
        if self._box is None or not self._in_box:
            return self._call.answer(answer, pulled)
        if pulled is not None and pulled.parts(self._plan):
            raise InvalidArgument("values in chunks do not go into a mailbox")
        self._box.answer(*encode_stream(answer, ()))
        return ()

    def hang_up(self) -> None:
        """See :class:`ShardTransport`."""
        self._over = True
        if self._box is not None:
            self._box.wake()

    def close(self) -> None:
        """See :class:`ShardTransport`."""
        if self._box is not None:
            self._box.close()
        self._segment = None

    def _arena_sizes(self, header: pb.ExchangeHeader) -> list[tuple[int, int]]:
        """Returns bytes and alignment of each arena in the encoding of the pull."""
        encoding = streams.from_encoding(header.pull.encoding)
        sizes = self._sizes.get(encoding)
        if sizes is None:
            check_values(encoding)
            itemsizes = ((a, value_dtype(a, encoding).itemsize) for a in self._plan.arenas)
            sizes = [(a.shard_length(self._shard) * n, n) for a, n in itemsizes]
            self._sizes[encoding] = sizes
        return sizes

    def _views(
        self, offsets: Sequence[int], sizes: Sequence[tuple[int, int]], what: str
    ) -> list[NDArray]:
        """Returns views of the segment at ``offsets``; ``sizes`` are pairs of bytes and
        alignment."""
        assert self._segment is not None  # it is not closed
        if len(offsets) != len(sizes):
            raise InvalidArgument(
                f"the {what} names {len(offsets)} places in the segment; expected {len(sizes)}"
            )
        return [
            self._segment.view(offset, nbytes, alignment)
            for offset, (nbytes, alignment) in zip(offsets, sizes, strict=True)
        ]


class MemoryAcceptor(Acceptor):
    """Attaches the segment that a worker offers."""

    fields = frozenset({"attach"})
    rule = "a segment is attached before anything else of the call"

    def __init__(self, plan: Plan, shard: int) -> None:
        self._plan = plan
        self._shard = shard

    def accept(
        self, header: pb.ExchangeHeader, present: ShardTransport
    ) -> tuple[pb.ExchangeAnswer, ShardTransport]:
        """See :class:`Acceptor`."""
        wanted = header.attach
        offer = Offer(wanted.pid, wanted.fd, wanted.nbytes, wanted.slot, wanted.nonce)
        try:
            segment = attach(offer, segment_nbytes(self._plan))
        except SegmentUnavailable as refused:
            return pb.ExchangeAnswer(attached=pb.Attached(refusal=str(refused))), present
        attached = pb.Attached(proof=segment.proof)
        box = None
        if wanted.mailbox_nbytes > HEAD_BYTES and mailbox.has_futex():
            memory = segment.view(wanted.mailbox_at, wanted.mailbox_nbytes)
            box = ShardBox(memory, wanted.session)
            attached.listens = True
        end = ShardMemory(present, segment, box, self._plan, self._shard)
        return pb.ExchangeAnswer(attached=attached), end
