"""Message streams that carry tensors: a header, then chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from pserver.core.assembly import Extent
from pserver.core.requests import Values
from pserver.core.table_ids import TableIds
from pserver.transport.progress import AwaitedMessages, TransferProgress
from pserver.wire.row_messages import pulled_parts
from psrpc.core.encoding import Encoding, Gradient
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.v1 import types_pb2 as types
from psrpc.wire.bounds import check_bounds
from psrpc.wire.codec import Piece, parse_message


def read_stream(
    messages: Iterator[bytes],
    header: type[Header],
    announced: Callable[[Header], int] | None = None,
    *,
    paced: bool = False,
) -> tuple[Header, Iterator[Piece]]:
    """Returns the header of a tensor stream, and its chunks as they arrive.

    Args:
        announced: returns the number of bytes that follow a header, if another header may come
            after them; otherwise the stream ends with its last chunk.
        paced: chunks must arrive as :class:`pserver.transport.progress.TransferProgress` demands,
            from the first request for one on.

    Raises:
        InvalidArgument: no header where one must be, or malformed bytes; raised by the iterator,
            too.
    """
    first = next(messages, None)
    if first is None:
        raise InvalidArgument("the stream is empty; expected a header")
    message = parse_message(first)
    if message.header is None:
        raise InvalidArgument("the stream begins without a header")
    parsed = parse_header(message.header, header)
    nbytes = announced and announced(parsed)
    if nbytes == 0 and message.chunk is not None:
        raise InvalidArgument(
            f"a chunk of {len(message.chunk.data)} bytes comes with a header that announces none"
        )
    if not paced or nbytes == (0 if message.chunk is None else len(message.chunk.data)):
        return parsed, _pieces(message.chunk, partial(next, messages, None), nbytes)
    return parsed, _paced_pieces(message.chunk, messages, nbytes)


def parse_header(data: bytes, header: type[Header]) -> Header:
    """Decodes a message of class ``header``; raises InvalidArgument if the bytes are malformed, or
    a field is longer than allowed (:mod:`psrpc.wire.bounds`)."""
    try:
        message = header.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"a header cannot be read as {header.__name__}: {error}") from None
    check_bounds(message, len(data))
    return message


def _paced_pieces(
    first: Piece | None, messages: Iterator[bytes], nbytes: int | None
) -> Iterator[Piece]:
    awaited, progress = AwaitedMessages(messages), TransferProgress(time.monotonic())
    try:
        for piece in _pieces(first, partial(awaited.next, progress), nbytes):
            progress.received(len(piece.data), time.monotonic())
            yield piece
    finally:
        awaited.close()


def _pieces(
    first: Piece | None, receive: Callable[[], bytes | None], nbytes: int | None
) -> Iterator[Piece]:
    received = 0
    if first is not None:
        received = len(first.data)
        yield first
    while nbytes is None or received < nbytes:
        data = receive()
        if data is None:
            return
        message = parse_message(data)
        if message.header is not None:
            raise InvalidArgument("the stream has a second header; expected chunks only")
        if message.chunk is not None:
            received += len(message.chunk.data)
            yield message.chunk


def announced_nbytes(extents: Iterable[types.Extent]) -> int:
    """Number of chunk bytes that follow a header with ``extents``."""
    return sum(extent.nbytes for extent in extents)


def value_parts(plan: Plan, values: Values, rows: TableIds = ()) -> list[tuple[int, memoryview]]:
    """Pairs of extent index and bytes: all arenas in plan order, except empty ones, then
    ``values.rows``, which are those of ``rows``."""
    parts = [
        (index, values.arrays[arena.name].view(np.uint8).data)
        for index, arena in enumerate(plan.arenas if values.arrays else ())
        if values.arrays[arena.name].size
    ]
    if rows:
        parts.extend(pulled_parts(plan, rows, values.rows))
    return parts


def gradient_parts(plan: Plan, gradient: Gradient) -> list[tuple[int, memoryview]]:
    """The same for a gradient."""
    return [
        (index, part.view(np.uint8).data)
        for index, arena in enumerate(plan.arenas)
        for part in gradient[arena.name].parts
        if part.size
    ]


def gradient_extents(plan: Plan, gradient: Gradient) -> list[Extent]:
    """The extents of a gradient, in plan order."""
    return [
        Extent(index, gradient[arena.name].nbytes, gradient[arena.name].encoding)
        for index, arena in enumerate(plan.arenas)
    ]


def to_encoding(encoding: Encoding) -> types.Encoding:
    """Encodes an encoding."""
    return _ENCODINGS[encoding]


def from_encoding(number: int) -> Encoding:
    """The inverse; raises InvalidArgument for an unset or unknown encoding."""
    if number not in _ENCODING_BY_NUMBER:
        raise InvalidArgument(f"encoding {number} is unknown; expected 1 to {len(_ENCODINGS)}")
    return _ENCODING_BY_NUMBER[number]


def to_extents(extents: Iterable[Extent]) -> list[types.Extent]:
    """Encodes extents."""
    return [
        types.Extent(arena=arena, nbytes=nbytes, encoding=_ENCODINGS[encoding])
        for arena, nbytes, encoding in extents
    ]


def from_extents(extents: Iterable[types.Extent]) -> tuple[Extent, ...]:
    """Decodes extents."""
    return tuple(Extent(e.arena, e.nbytes, from_encoding(e.encoding)) for e in extents)


_ENCODINGS: dict[Encoding, types.Encoding] = {
    "plain": types.ENCODING_PLAIN,
    "bfloat16": types.ENCODING_BFLOAT16,
    "float16": types.ENCODING_FLOAT16,
    "int8": types.ENCODING_INT8,
    "topk": types.ENCODING_TOPK,
}

_ENCODING_BY_NUMBER: dict[int, Encoding] = {number: e for e, number in _ENCODINGS.items()}

Header = TypeVar("Header", bound=Message)
