"""Serves one ``Exchange`` call on the shard: exchange after exchange until one side leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import check_values, value_dtype
from pserver.core.requests import PushResult, RowsRequest, Values
from pserver.core.table_ids import TableIds, check_tables, from_table_ids, row_extents
from pserver.engine.engine import ShardEngine
from pserver.transport import futex
from pserver.transport.arrival import Arrival, Chunks, Shared, Streamed
from pserver.transport.data_connection import DataConnection
from pserver.transport.data_listener import DataListener, Expected
from pserver.transport.mailbox import HEAD_BYTES, ShardBox
from pserver.transport.segment import AttachedSegment, Offer, SegmentUnavailable, attach
from pserver.transport.workspace import segment_nbytes
from pserver.wire import messages as wire
from pserver.wire import streams
from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import ALIGNMENT_BYTES
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.codec import encode_stream

NDArray = npt.NDArray[Any]

Parts = Sequence[tuple[int, memoryview]]
"""Tensors to send as pairs of extent index and bytes, for the codec."""

_ELEMENT_BYTES = 4


class _Room(NamedTuple):
    """Places in the segment, uint8 of arenas and float32 ``[n, width]`` of tables; None if the
    values travel in chunks."""

    arenas: list[NDArray] | None = None
    rows: tuple[npt.NDArray[np.float32], ...] | None = None


class Conversation:
    """Decodes requests, calls the engine, encodes answers; holds the segment shared with the
    worker.

    For one thread. ``idle`` is True while it waits for the next request; ``leaving``, which any
    thread may set, ends it when it would become idle. :meth:`hang_up` tells it that the call has
    ended."""

    def __init__(
        self, engine: ShardEngine, certificate: str = "", data: DataListener | None = None
    ) -> None:
        """Args:
        certificate: common name of the caller's certificate; empty without certificates.
        data: accepts data connections; None if they are disabled.
        """
        self.idle = True
        self.leaving = False
        self._engine = engine
        self._certificate = certificate
        self._segment: AttachedSegment | None = None
        self._box: ShardBox | None = None
        self._listener = data
        self._expected: Expected | None = None
        self._data: DataConnection | None = None
        self._over = False
        self._sizes: dict[Encoding, list[tuple[int, int]]] = {}
        self._began = False

    def answers(
        self, messages: Iterator[bytes], patience_s: Callable[[], float]
    ) -> Iterator[bytes]:
        """Yields the shard's messages of the call; a PsError ends it. ``patience_s`` returns how
        long the call lets an exchange wait from now on."""
        try:
            while (request := self._next(messages)) is not None:
                self.idle = False
                first, way = request
                if isinstance(way, DataConnection):
                    header = streams.parse_header(first, pb.ExchangeHeader)
                    answer, parts = self._exchange(header, Streamed(way), patience_s())
                    way.send(answer.SerializeToString(), [part for _, part in parts])
                else:
                    rest = chain((first,), messages) if way is None else iter((first,))
                    header, pieces = streams.read_stream(
                        rest, pb.ExchangeHeader, _announced, paced=way is None
                    )
                    answer, parts = self._exchange(header, Chunks(pieces), patience_s())
                    del pieces
                    if way is None:
                        yield from encode_stream(answer, parts)
                    elif parts:
                        raise InvalidArgument("values in chunks do not go into a mailbox")
                    else:
                        way.answer(*encode_stream(answer, ()))
                # Free up to 2 MiB while waiting for the worker.
                del first, request, header, answer, parts
                # In this order: a thread that sets ``leaving`` reads ``idle`` afterwards.
                self.idle = True
                if self.leaving:
                    return
        finally:
            # After a cut call gRPC keeps an error, and that these frames, until garbage collection:
            # too long for a worker's memory.
            if self._box is not None:
                self._box.close()
            if self._expected is not None:
                self._expected.forget()
            if self._data is not None:
                self._data.close()
            self._segment = None

    def hang_up(self) -> None:
        """Marks the call as over and ends its waits. Any thread may call it."""
        self._over = True
        box, data = self._box, self._data
        if box is not None:
            box.wake()
        if data is not None:
            data.hang_up()

    def _next(
        self, messages: Iterator[bytes]
    ) -> tuple[bytes, ShardBox | DataConnection | None] | None:
        """Returns the first message of the next exchange, with the mailbox or data connection that
        it came through (None: gRPC); None at the end of the call."""
        if self._data is not None:
            if self._over:
                # The call may have ended before the connection was there to hang up.
                return None
            received = self._data.receive_message()
            return None if received is None else (received, self._data)
        if self._box is not None:
            received = self._box.receive(lambda: self._over)
            if received is None:
                return None
            if received:
                return received, self._box
        sent = next(messages, None)
        return None if sent is None else (sent, None)

    def _exchange(
        self, header: pb.ExchangeHeader, arrival: Arrival, patience_s: float
    ) -> tuple[pb.ExchangeAnswer, Parts]:
        """Returns the answer to an exchange, and the tensors that it announces."""
        if header.patience_ms:
            patience_s = min(patience_s, header.patience_ms / 1000)
        pushing, pulling = header.HasField("push"), header.HasField("pull")
        if header.HasField("attach"):
            if pushing or pulling or self._began:
                raise InvalidArgument("a segment is attached before anything else of the call")
            return pb.ExchangeAnswer(attached=self._attach(header.attach)), ()
        if header.HasField("open_data") or header.use_data:
            if pushing or pulling or self._began or self._data is not None:
                raise InvalidArgument("a data connection is opened once, before any push or pull")
            return pb.ExchangeAnswer(data=self._take_data(header.use_data)), ()
        self._began = True
        if pushing:
            with self._engine.refusals_counted():
                # Before anything changes, since the named places may not exist.
                rows = from_table_ids(header.pull.rows) if header.pull.rows else ()
                room = self._room(header, rows, header.pull.rows_only)
                result, values = self._push(header, arrival, patience_s, rows, room)
            return self._answer(result, values, rows, room)
        if pulling:
            request = self._engine.credentials.pull(wire.from_pull(header.pull), self._certificate)
            room = self._room(header, request.rows, request.rows_only)
            values = self._engine.pull(request, patience_s, room.rows)
            return self._answer(None, values, request.rows, room)
        raise InvalidArgument("an exchange asks for nothing; expected a push, a pull or both")

    def _push(
        self,
        header: pb.ExchangeHeader,
        arrival: Arrival,
        patience_s: float,
        rows: TableIds,
        room: _Room,
    ) -> tuple[PushResult, Values | None]:
        request = self._engine.credentials.push(wire.from_push(header.push), self._certificate)
        if header.push_at:
            sizes = [(extent.nbytes, ALIGNMENT_BYTES) for extent in request.extents]
            views = self._views(header.push_at, sizes, "push")
            cut = max(0, len(views) - len(request.rows))
            arrival = Shared(views[:cut], views[cut:]) if request.rows else Shared(views)
        vouch = self._engine.credentials.vouch
        if not header.HasField("pull"):
            return vouch(request, self._engine.push(request, arrival, patience_s)), None
        if header.pull.WhichOneof("source") != "newest" or header.pull.HasField("decision"):
            raise InvalidArgument("a pull with a push is of the newest values")
        encoding = streams.from_encoding(header.pull.encoding)
        only = header.pull.rows_only
        wanted = RowsRequest(rows, room.rows, only) if rows or only else None
        result, values = self._engine.push_pull(request, arrival, patience_s, encoding, wanted)
        return vouch(request, result), values

    def _answer(
        self, result: PushResult | None, values: Values | None, rows: TableIds, room: _Room
    ) -> tuple[pb.ExchangeAnswer, Parts]:
        plan = self._engine.plan
        answer = pb.ExchangeAnswer()
        if result is not None:
            answer.push.CopyFrom(wire.to_push_result(result))
        if values is None:
            return answer, ()
        answer.pull.CopyFrom(wire.to_pull_header(plan, values, rows))
        if room.arenas is None:
            return answer, streams.value_parts(plan, values, rows)
        # The engine has written the rows there already.
        for view, arena in zip(room.arenas, plan.arenas if values.arrays else (), strict=True):
            np.copyto(view, values.arrays[arena.name].view(np.uint8))
        return answer, ()

    def _room(self, header: pb.ExchangeHeader, rows: TableIds, rows_only: bool) -> _Room:
        """Places in the segment for the values of a pull."""
        if not header.pull_at:
            return _Room()
        if not rows and not rows_only:
            return _Room(self._views(header.pull_at, self._arena_sizes(header), "pull"))
        plan = self._engine.plan
        check_tables(plan, rows)
        sizes = [] if rows_only else self._arena_sizes(header)
        of_rows = [(extent.nbytes, _ELEMENT_BYTES) for extent in row_extents(plan, rows)]
        views = self._views(header.pull_at, [*sizes, *of_rows], "pull")
        into = (
            view.view(np.float32).reshape(len(ids), plan.tables[table].width)
            for view, (table, ids) in zip(views[len(sizes) :], rows, strict=True)
        )
        return _Room(views[: len(sizes)], tuple(into))

    def _arena_sizes(self, header: pb.ExchangeHeader) -> list[tuple[int, int]]:
        """Bytes and alignment of each arena in the encoding of the pull."""
        encoding = streams.from_encoding(header.pull.encoding)
        sizes = self._sizes.get(encoding)
        if sizes is None:
            check_values(encoding)
            shard = self._engine.identity.shard
            arenas = self._engine.plan.arenas
            itemsizes = ((a, value_dtype(a, encoding).itemsize) for a in arenas)
            sizes = self._sizes[encoding] = [(a.shard_length(shard) * n, n) for a, n in itemsizes]
        return sizes

    def _views(
        self, offsets: Sequence[int], sizes: Sequence[tuple[int, int]], what: str
    ) -> list[NDArray]:
        """The named places in the segment; ``sizes`` are pairs of bytes and alignment."""
        if self._segment is None:
            raise InvalidArgument(f"the {what} lies in a segment, and none is attached")
        if len(offsets) != len(sizes):
            raise InvalidArgument(
                f"the {what} names {len(offsets)} places in the segment; expected {len(sizes)}"
            )
        return [
            self._segment.view(offset, nbytes, alignment)
            for offset, (nbytes, alignment) in zip(offsets, sizes, strict=True)
        ]

    def _attach(self, wanted: pb.Attach) -> pb.Attached:
        offer = Offer(wanted.pid, wanted.fd, wanted.nbytes, wanted.slot, wanted.nonce)
        try:
            self._segment = attach(offer, segment_nbytes(self._engine.plan))
        except SegmentUnavailable as refused:
            return pb.Attached(refusal=str(refused))
        attached = pb.Attached(proof=self._segment.proof)
        if wanted.mailbox_nbytes > HEAD_BYTES and futex.available():
            memory = self._segment.view(wanted.mailbox_at, wanted.mailbox_nbytes)
            self._box = ShardBox(memory, wanted.session)
            attached.listens = True
        return attached

    def _take_data(self, come: bool) -> pb.DataOpened:
        """Expects a data connection or, if the worker has ``come``, switches to it."""
        if come:
            expected, self._expected = self._expected, None
            data = None if expected is None else expected.take("the worker")
            if data is None:
                raise InvalidArgument("the call has no data connection; open one first")
            self._data = data
            return pb.DataOpened()
        if self._listener is None:
            return pb.DataOpened(refusal="the shard takes none (--data-connections off)")
        if self._expected is not None:
            raise InvalidArgument("the call expects a data connection already")
        self._expected = self._listener.expect()
        return pb.DataOpened(port=self._expected.port, secret=self._expected.secret)


def _announced(header: pb.ExchangeHeader) -> int:
    """Number of chunk bytes that follow a header."""
    return 0 if header.push_at else streams.announced_nbytes(header.push.extents)
