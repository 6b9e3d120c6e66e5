"""Encodes and decodes streams of arena chunks: protobuf on the wire, but without protobuf objects.

Every message of a tensor stream is ``{header = 1; Chunk chunk = 2}`` with
``Chunk{arena = 1; offset = 2; data = 3}``, which any gRPC client can speak with the generated
classes. This module joins the payload to a hand-made prefix when sending, and reads it through a
memoryview when receiving, because protobuf objects would copy it two more times each way.

The field numbers are load-bearing; see protos/psrpc/v1/parameter_server.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from google.protobuf.message import Message

from psrpc.core.errors import InvalidArgument

MAX_CHUNK_BYTES = 2 << 20
"""Maximum payload per message. Streams are equally fast from 1 to 4 MiB, and slower above."""

_HEADER_TAG = 0x0A  # field 1, length-delimited
_HEADER_ONLY = bytes((_HEADER_TAG,))
_CHUNK_TAG = 0x12  # field 2, length-delimited
_ARENA_TAG = 0x08  # field 1, varint
_OFFSET_TAG = 0x10  # field 2, varint
_DATA_TAG = 0x1A  # field 3, length-delimited

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Piece:
    """A received chunk; ``data`` is a view into its message."""

    arena: int
    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One received message: the serialized header, a chunk, or both."""

    header: bytes | None
    chunk: Piece | None


def encode_stream(header: Message, parts: Sequence[tuple[int, memoryview]]) -> Iterator[bytes]:
    """Serializes whole arenas as a stream.

    Args:
        header: sent in the first message, together with the first chunk.
        parts: pairs of arena index and a contiguous view of its bytes; consecutive pairs of one
            arena are contiguous in it. Empty arenas make no chunk.
    """
    body = header.SerializeToString()
    prefix = b"".join((bytes((_HEADER_TAG,)), _varint(len(body)), body))
    if not parts:
        yield prefix
        return
    for arena, pairs in groupby(parts, key=itemgetter(0)):
        offset = 0
        for data in _cut(view for _, view in pairs):
            nbytes = sum(map(len, data))
            yield b"".join((prefix, _chunk_prefix(arena, offset, nbytes), *data))
            prefix = b""
            offset += nbytes
    if prefix:
        yield prefix


def _cut(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yields the bytes of ``views`` in order, at most MAX_CHUNK_BYTES at a time."""
    chunk: list[memoryview] = []
    room = MAX_CHUNK_BYTES
    for view in views:
        # Python cannot cast a view with a zero in its shape.
        rest = view.cast("B") if view.nbytes else view[:0]
        while rest.nbytes:
            chunk.append(rest[:room])
            room -= len(chunk[-1])
            rest = rest[len(chunk[-1]) :]
            if not room:
                yield chunk
                chunk, room = [], MAX_CHUNK_BYTES
    if chunk:
        yield chunk


def parse_message(message: bytes) -> StreamMessage:
    """Reads one message of a stream; skips unknown fields.

    Raises:
        InvalidArgument: the bytes are not such a message.
    """
    view = memoryview(message)
    headers: list[memoryview] = []
    chunk: Piece | None = None
    try:
        if message[:1] == _HEADER_ONLY:
            size, at = _read_varint(view, 1)
            if at + size == len(view):
                return StreamMessage(message[at:], None)
        for tag, _, value in _fields(view):
            if tag == _HEADER_TAG:
                # Protobuf merges repeated occurrences of a message field; concatenating their bytes
                # does the same.
                headers.append(value)
            elif tag == _CHUNK_TAG:
                if chunk is not None:
                    raise InvalidArgument("a stream message holds two chunks; expected one")
                chunk = _parse_chunk(value)
    except IndexError:
        raise InvalidArgument(
            f"a stream message of {len(message)} bytes is cut short or not protobuf"
        ) from None
    return StreamMessage(b"".join(headers) if headers else None, chunk)


def _parse_chunk(view: memoryview) -> Piece:
    arena, offset, data = 0, 0, view[:0]
    for tag, number, value in _fields(view):
        if tag == _ARENA_TAG:
            arena = number & 0xFFFFFFFF  # as protobuf reads a uint32
        elif tag == _OFFSET_TAG:
            offset = number
        elif tag == _DATA_TAG:
            data = value
    return Piece(arena, offset, data)


def _fields(view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yields ``(tag, number, payload)`` of each field; raises IndexError if bytes are missing."""
    at, end = 0, len(view)
    while at < end:
        tag, at = _read_varint(view, at)
        number, payload = 0, view[:0]
        wire_type = tag & 7
        if tag >> 3 == 0 or tag >> 32:
            raise InvalidArgument(f"a stream message has the impossible field tag {tag}")
        if wire_type == _VARINT:
            number, at = _read_varint(view, at)
        elif wire_type in (_LENGTH, _FIXED64, _FIXED32):
            if wire_type == _LENGTH:
                size, at = _read_varint(view, at)
            else:
                size = 8 if wire_type == _FIXED64 else 4
            if size > end - at:
                raise IndexError
            payload = view[at : at + size]
            at += size
        else:
            raise InvalidArgument(f"a stream message has a field of unknown wire type {wire_type}")
        yield tag, number, payload


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            raise InvalidArgument("a stream message has a varint of more than 10 bytes")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _chunk_prefix(arena: int, offset: int, nbytes: int) -> bytes:
    # Omits zeros, as proto3 and so the generated classes do.
    inner = b"".join(
        (
            bytes((_ARENA_TAG,)) + _varint(arena) if arena else b"",
            bytes((_OFFSET_TAG,)) + _varint(offset) if offset else b"",
            bytes((_DATA_TAG,)) + _varint(nbytes),
        )
    )
    return b"".join((bytes((_CHUNK_TAG,)), _varint(len(inner) + nbytes), inner))
