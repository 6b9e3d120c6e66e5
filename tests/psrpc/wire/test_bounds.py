"""Every field of a request that a peer can make long has a bound, and the bound is obeyed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from coordinator.job.authority import Authority
from psrpc.core.errors import InvalidArgument
from psrpc.net.limits import MAX_MESSAGE_BYTES
from psrpc.security.signatures import GRANT_BYTES
from psrpc.v1 import coordinator_pb2 as coordinator
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.bounds import BOUNDS, NAME, TEXT, check_bounds, shorten

_PACKAGE = "psrpc.v1."


class Long(NamedTuple):
    """A field that can be long: the message of a server's that it is in, and the way there."""

    root: Descriptor
    way: tuple[FieldDescriptor, ...]

    @property
    def field(self) -> FieldDescriptor:
        return self.way[-1]

    @property
    def message(self) -> str:
        return self.holder.full_name.removeprefix(_PACKAGE)

    @property
    def holder(self) -> Descriptor:
        found: Any = self.field.containing_type
        assert isinstance(found, Descriptor)
        return found

    def __str__(self) -> str:
        return ".".join([self.root.name, *(field.name for field in self.way)])


def _long_fields(root: Descriptor, way: tuple[FieldDescriptor, ...] = ()) -> Iterator[Long]:
    message: Any = way[-1].message_type if way else root
    for field in message.fields:
        here = (*way, field)
        if field.is_repeated or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            yield Long(root, here)
        if field.message_type is not None:
            yield from _long_fields(root, here)


def _requests() -> list[Descriptor]:
    """The messages that servers read: the requests of all RPCs."""
    return [
        method.input_type
        for file, service in ((pb, "ParameterServer"), (coordinator, "Coordinator"))
        for method in file.DESCRIPTOR.services_by_name[service].methods
    ]


LONG = [long for request in _requests() for long in _long_fields(request)]
# Read by psrpc.wire.codec, which has no message of it.
READ = [long for long in LONG if long.message != "Chunk"]


def _bound(long: Long) -> int:
    return BOUNDS[long.message][long.field.name]


def _is_map(field: FieldDescriptor) -> bool:
    inner: Any = field.message_type
    return bool(inner is not None and inner.GetOptions().map_entry)


def _tag(field: FieldDescriptor) -> bytes:
    return _varint(field.number << 3 | 2)


def _varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])


def _filled(long: Long, length: int) -> Any:
    """A request with one field of ``length``."""
    root = message = GetMessageClass(long.root)()
    for field in long.way[:-1]:
        inner = getattr(message, field.name)
        if not field.is_repeated:
            inner.SetInParent()
        elif _is_map(field):
            inner["x" * length] = 1.0
            return root
        message = inner.add() if field.is_repeated else inner
    field = long.field
    if not field.is_repeated:
        setattr(message, field.name, (b"x" if field.type == field.TYPE_BYTES else "x") * length)
    elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        entry: Any = "x" if field.type == field.TYPE_STRING else b"x"
        getattr(message, field.name).extend([entry] * length)
    elif field.message_type is None:
        # As bytes, packed: many times as fast.
        size = 8 if field.type == field.TYPE_DOUBLE else 1
        message.MergeFromString(_tag(field) + _varint(length * size) + bytes(length * size))
    elif _is_map(field):
        getattr(message, field.name).update({str(i): 1.0 for i in range(length)})
    else:
        message.MergeFromString((_tag(field) + b"\0") * length)
    return root


@pytest.mark.parametrize("long", LONG, ids=str)
def test_every_field_that_can_be_long_has_a_bound(long: Long) -> None:
    assert long.message in BOUNDS, f"psrpc.wire.bounds has nothing of {long.message}"
    assert long.field.name in BOUNDS[long.message], f"psrpc.wire.bounds has no bound of {long}"
    if long.field.is_repeated and long.field.type in (
        FieldDescriptor.TYPE_STRING,
        FieldDescriptor.TYPE_BYTES,
    ):
        assert f"{long.message}.{long.field.name}" in BOUNDS, f"each entry of {long} needs one"


@pytest.mark.parametrize("long", READ, ids=str)
def test_one_more_than_the_bound_is_refused_by_the_name_of_the_field(long: Long) -> None:
    bound = _bound(long)
    message = _filled(long, bound)
    check_bounds(message, message.ByteSize())
    message = _filled(long, bound + 1)
    with pytest.raises(InvalidArgument) as refused:
        check_bounds(message, message.ByteSize())
    said = str(refused.value)
    assert str(bound + 1) in said
    assert f"at most {bound}" in said
    if not long.holder.GetOptions().map_entry:
        assert f"{long.message}.{long.field.name}" in said


def test_each_of_several_strings_has_a_bound() -> None:
    request = coordinator.SetPolicyRequest(settings=["mode=sync", "x" * 4097])
    with pytest.raises(InvalidArgument, match=r"SetPolicyRequest.settings.*4097.*at most 4096"):
        check_bounds(request, request.ByteSize())


def test_no_bound_is_of_a_field_that_is_gone() -> None:
    named = {(long.message, long.field.name) for long in LONG}
    bounds = {(message, field) for message, fields in BOUNDS.items() for field in fields if field}
    assert bounds == named
    assert all(bound < MAX_MESSAGE_BYTES for fields in BOUNDS.values() for bound in fields.values())


def test_a_header_as_our_workers_send_it_is_shorter_than_any_bound() -> None:
    """So it is not looked at: nothing in it can be too long."""
    assert check_bounds.__doc__
    header = pb.ExchangeHeader()
    header.push.fence.MergeFrom(
        types.Fence(
            generation=300,
            policy=2,
            plan_hash=b"x" * 32,
            shard_incarnation=1 << 62,
            session=Authority().open_session("worker-12", "worker"),
        )
    )
    header.push.batch.MergeFrom(types.BatchId(epoch=9, first=1 << 20, count=64))
    header.push.attempt, header.push.grant = 1 << 45, b"x" * GRANT_BYTES
    header.push.base_version, header.push.examples = 1 << 20, 64
    header.push.extents.add(arena=1, nbytes=1 << 26, encoding=1)
    assert header.ByteSize() <= NAME


def test_words_that_are_longer_than_a_server_takes_are_cut_before_they_are_sent() -> None:
    request = coordinator.HeartbeatWorkerRequest(session=b"w", waiting_for="x" * 2 * TEXT)
    request.transports.add(shard=1, why="y" * 2 * TEXT)
    shorten(request)
    check_bounds(request, request.ByteSize())
    assert request.waiting_for == "x" * (TEXT - 1) + "…"
    assert len(request.transports[0].why) == TEXT
