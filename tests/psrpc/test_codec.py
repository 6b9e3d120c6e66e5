"""The hand-made codec against the classes that protoc generates, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrpc.codec import MAX_CHUNK_BYTES, encode_stream, parse_message
from psrpc.errors import InvalidArgument
from psrpc.v1.parameter_server_pb2 import PullHeader, PullResponse
from psrpc.v1.types_pb2 import Chunk, Extent

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    PullHeader,
    version=uint64,
    generation=uint64,
    extents=st.lists(st.builds(Extent, arena=uint32, nbytes=uint64), max_size=3),
)
chunks = st.builds(Chunk, arena=uint32, offset=uint64, data=st.binary(max_size=300))


@given(header=headers, parts=st.lists(st.tuples(uint32, st.binary(max_size=300)), max_size=4))
def test_generated_classes_read_what_the_codec_writes(
    header: PullHeader, parts: list[tuple[int, bytes]]
) -> None:
    stream = list(encode_stream(header, [(arena, memoryview(data)) for arena, data in parts]))
    messages = [PullResponse.FromString(data) for data in stream]
    assert messages[0].header == header
    assert not any(message.HasField("header") for message in messages[1:])
    sent = [(m.chunk.arena, m.chunk.offset, m.chunk.data) for m in messages if m.HasField("chunk")]
    assert sent == [(arena, 0, data) for arena, data in parts if data]
    # The very same bytes, so that a cache or a signature over them would agree too.
    assert [message.SerializeToString() for message in messages] == stream


@given(header=st.none() | headers, chunk=st.none() | chunks)
def test_codec_reads_what_the_generated_classes_write(
    header: PullHeader | None, chunk: Chunk | None
) -> None:
    parsed = parse_message(PullResponse(header=header, chunk=chunk).SerializeToString())
    assert (parsed.header is None) == (header is None)
    if header is not None:
        assert PullHeader.FromString(parsed.header or b"") == header
    assert (parsed.chunk is None) == (chunk is None)
    if chunk is not None and parsed.chunk is not None:
        assert (parsed.chunk.arena, parsed.chunk.offset) == (chunk.arena, chunk.offset)
        assert bytes(parsed.chunk.data) == chunk.data


@given(st.binary(max_size=60))
def test_garbage_is_refused_or_read_as_protobuf_reads_it(data: bytes) -> None:
    try:
        parse_message(data)
    except InvalidArgument:
        return


@given(chunk=chunks, cut=st.integers(1, 20))
def test_a_cut_message_is_refused_or_has_less(chunk: Chunk, cut: int) -> None:
    whole = PullResponse(chunk=chunk).SerializeToString()
    try:
        parsed = parse_message(whole[:-cut])
    except InvalidArgument:
        return
    assert len(whole) <= cut or parsed.chunk is None


def test_a_large_arena_is_cut_into_chunks() -> None:
    data = bytes(range(256)) * (MAX_CHUNK_BYTES // 256) + b"tail"
    pieces = [parse_message(m).chunk for m in encode_stream(PullHeader(), [(3, memoryview(data))])]
    assert [(p.arena, p.offset, len(p.data)) for p in pieces if p] == [
        (3, 0, MAX_CHUNK_BYTES),
        (3, MAX_CHUNK_BYTES, 4),
    ]
    assert b"".join(p.data for p in pieces if p) == data


def test_unknown_fields_of_a_newer_version_are_skipped() -> None:
    known = PullResponse(chunk=Chunk(arena=1, data=b"abcd")).SerializeToString()
    unknown = bytes([15 << 3 | 2, 2]) + b"hi" + bytes([14 << 3 | 0, 200, 1])
    parsed = parse_message(unknown + known)
    assert parsed.chunk is not None
    assert bytes(parsed.chunk.data) == b"abcd"


def test_two_chunks_in_one_message_are_refused() -> None:
    one = PullResponse(chunk=Chunk(data=b"abcd")).SerializeToString()
    with pytest.raises(InvalidArgument, match="two chunks"):
        parse_message(one + one)
