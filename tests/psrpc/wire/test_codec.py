"""The hand-made codec against the classes that protoc generates, both ways.

Every message of a tensor stream is found in the contract itself, so a new one is tested too.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from psrpc.core.errors import InvalidArgument
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1.parameter_server_pb2 import PullHeader, PullResponse
from psrpc.v1.types_pb2 import Chunk
from psrpc.wire import codec
from psrpc.wire.codec import MAX_CHUNK_BYTES, encode_stream, parse_message


def _stream_messages() -> list[Any]:
    """Every message class that is streamed to or from a shard."""
    service = pb.DESCRIPTOR.services_by_name["ParameterServer"]
    streamed = [m.input_type for m in service.methods if m.client_streaming]
    streamed += [m.output_type for m in service.methods if m.server_streaming]
    return [GetMessageClass(descriptor) for descriptor in streamed]


MESSAGES = _stream_messages()
examples = settings(max_examples=60, derandomize=True)
each_message = pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.DESCRIPTOR.name)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
_KINDS: dict[int, st.SearchStrategy[Any]] = {
    # A message with a NaN equals no message, not even itself.
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_UINT32: uint32,
    FieldDescriptor.TYPE_UINT64: uint64,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=20),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
}


def messages_of(descriptor: Descriptor) -> st.SearchStrategy[Any]:
    """Messages of any content: each field absent or with any value of its type."""
    return st.builds(
        GetMessageClass(descriptor),
        **{field.name: st.none() | _values(field) for field in descriptor.fields},
    )


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        one = messages_of(field.message_type)
    elif field.enum_type is not None:
        one = st.sampled_from([value.number for value in field.enum_type.values])
    else:
        one = _KINDS[field.type]
    return st.lists(one, max_size=2) if field.is_repeated else one


def headers_of(cls: Any) -> st.SearchStrategy[Any]:
    return messages_of(cls.DESCRIPTOR.fields_by_name["header"].message_type)


chunks = st.builds(Chunk, arena=uint32, offset=uint64, data=st.binary(max_size=300))


def check_alike(cls: Any, data: bytes) -> None:
    """The codec refuses ``data``, or reads in it what the generated class does."""
    try:
        parsed = parse_message(data)
    except InvalidArgument:
        return
    header_class = GetMessageClass(cls.DESCRIPTOR.fields_by_name["header"].message_type)
    try:
        message = cls.FromString(data)
    except DecodeError:
        # What the codec leaves to the generated classes must then be at fault.
        with pytest.raises(DecodeError):
            header_class.FromString(parsed.header or b"")
        return
    assert (parsed.header is not None) == message.HasField("header")
    assert header_class.FromString(parsed.header or b"") == message.header
    assert (parsed.chunk is not None) == message.HasField("chunk")
    if parsed.chunk is not None:
        chunk = message.chunk
        found = (parsed.chunk.arena, parsed.chunk.offset, bytes(parsed.chunk.data))
        assert found == (chunk.arena, chunk.offset, chunk.data)


def test_every_stream_of_the_contract_is_here() -> None:
    names = {cls.DESCRIPTOR.name for cls in MESSAGES}
    assert names == {
        "InitializeRequest",
        "PullResponse",
        "PushGradientsRequest",
        "ExchangeRequest",
        "ExchangeResponse",
    }


@each_message
def test_a_stream_message_has_the_form_the_codec_knows(cls: Any) -> None:
    fields = {field.number: field for field in cls.DESCRIPTOR.fields}
    assert [(n, fields[n].name) for n in sorted(fields)] == [(1, "header"), (2, "chunk")]
    assert fields[2].message_type is Chunk.DESCRIPTOR
    assert not any(field.is_repeated for field in fields.values())


@pytest.mark.slow
@each_message
@examples
@given(data=st.data())
def test_generated_classes_read_what_the_codec_writes(cls: Any, data: st.DataObject) -> None:
    header = data.draw(headers_of(cls))
    # An arena may lie in several buffers.
    arenas = data.draw(st.dictionaries(uint32, st.lists(st.binary(max_size=30)), max_size=4))
    most = data.draw(st.sampled_from((1, 7, 8, MAX_CHUNK_BYTES)))
    parts = [(arena, memoryview(part)) for arena, buffers in arenas.items() for part in buffers]
    with patch.object(codec, "MAX_CHUNK_BYTES", most):
        stream = list(encode_stream(header, parts))
    messages = [cls.FromString(item) for item in stream]
    assert messages[0].header == header
    assert not any(message.HasField("header") for message in messages[1:])
    assert [m.chunk for m in messages if m.HasField("chunk")] == [
        Chunk(arena=arena, offset=offset, data=whole[offset : offset + most])
        for arena, whole in ((arena, b"".join(buffers)) for arena, buffers in arenas.items())
        for offset in range(0, len(whole), most)
    ]
    # The very same bytes, so that a cache or a signature over them would agree too.
    assert [message.SerializeToString() for message in messages] == stream


@pytest.mark.slow
@each_message
@examples
@given(data=st.data())
def test_codec_reads_what_the_generated_classes_write(cls: Any, data: st.DataObject) -> None:
    header = data.draw(st.none() | headers_of(cls))
    chunk = data.draw(st.none() | chunks)
    parsed = parse_message(cls(header=header, chunk=chunk).SerializeToString())
    assert (parsed.header is None) == (header is None)
    if header is not None:
        assert type(header).FromString(parsed.header or b"") == header
    assert (parsed.chunk is None) == (chunk is None)
    if chunk is not None and parsed.chunk is not None:
        assert (parsed.chunk.arena, parsed.chunk.offset) == (chunk.arena, chunk.offset)
        assert bytes(parsed.chunk.data) == chunk.data


@pytest.mark.slow
@each_message
@examples
@given(data=st.binary(max_size=60))
def test_garbage_is_refused_or_read_as_the_generated_classes_do(cls: Any, data: bytes) -> None:
    check_alike(cls, data)


@pytest.mark.slow
@each_message
@examples
@given(data=st.data())
def test_so_is_a_message_that_was_damaged(cls: Any, data: st.DataObject) -> None:
    message = cls(header=data.draw(st.none() | headers_of(cls)), chunk=data.draw(chunks))
    damaged = bytearray(message.SerializeToString())
    places = st.integers(0, len(damaged) - 1)
    for at, value in data.draw(st.dictionaries(places, st.integers(0, 255), max_size=3)).items():
        damaged[at] = value
    check_alike(cls, bytes(damaged[: data.draw(places | st.none())]))


def test_a_large_arena_is_cut_into_chunks() -> None:
    data = bytes(range(256)) * (MAX_CHUNK_BYTES // 256) + b"tail"
    pieces = [parse_message(m).chunk for m in encode_stream(PullHeader(), [(3, memoryview(data))])]
    assert [(p.arena, p.offset, len(p.data)) for p in pieces if p] == [
        (3, 0, MAX_CHUNK_BYTES),
        (3, MAX_CHUNK_BYTES, 4),
    ]
    assert b"".join(p.data for p in pieces if p) == data


def test_an_arena_in_several_arrays_is_one_run_of_bytes() -> None:
    arrays: list[npt.NDArray[Any]] = [np.ones((2, 3), np.float32), np.zeros((0, 3)), np.arange(2)]
    (message,) = encode_stream(PullHeader(), [(3, array.data) for array in arrays])
    chunk = parse_message(message).chunk
    assert chunk is not None
    assert chunk.data == b"".join(array.tobytes() for array in arrays)


def test_unknown_fields_of_a_newer_version_are_skipped() -> None:
    known = PullResponse(chunk=Chunk(arena=1, data=b"abcd")).SerializeToString()
    unknown = bytes([15 << 3 | 2, 2]) + b"hi" + bytes([14 << 3 | 0, 200, 1])
    parsed = parse_message(unknown + known)
    assert parsed.chunk is not None
    assert bytes(parsed.chunk.data) == b"abcd"


@pytest.mark.parametrize(
    "data",
    [
        PullResponse(header=PullHeader(version=1)).SerializeToString()
        + PullResponse(header=PullHeader(generation=2), chunk=Chunk()).SerializeToString(),
        # Chunk.arena, a uint32, as a varint of 2^32 + 5; then offset with needless zero bytes.
        bytes.fromhex("12 0b 08 85 80 80 80 10 10 83 80 80 00"),
        # A field of another wire type than the contract's is an unknown field.
        bytes.fromhex("12 0b 08 07 1d 01 02 03 04 1a 02 61 62"),
    ],
    ids=["header in two parts", "wide varints", "other wire type"],
)
def test_unusual_protobuf_is_read_as_the_generated_classes_do(data: bytes) -> None:
    assert parse_message(data).chunk is not None
    check_alike(PullResponse, data)


def test_a_header_in_many_pieces_is_one() -> None:
    """Each is copied once: a peer may send a million of them."""
    pieces = [b"", b"first", b"", b"second"]
    message = b"".join(bytes((0x0A, len(piece))) + piece for piece in pieces)
    assert parse_message(message).header == b"firstsecond"
    assert parse_message(b"\x0a\x00").header == b""
    assert parse_message(b"").header is None


def test_two_chunks_in_one_message_are_refused() -> None:
    one = PullResponse(chunk=Chunk(data=b"abcd")).SerializeToString()
    with pytest.raises(InvalidArgument, match="two chunks"):
        parse_message(one + one)
