"""The RPCs of a shard and its data port, as any worker may reach them.

A seed has the session of a worker and the grant of one attempt; nothing else is proven, so at most
one batch may ever be applied.
"""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

from google.protobuf.message import DecodeError, Message

from pserver.core.assembly import shard_extents
from pserver.engine.engine import ShardEngine
from pserver.server.servicer import Conversation, ParameterServerServicer
from pserver.transport.byte_stream import SealedStream
from pserver.transport.data_connection import DataConnection
from pserver.transport.data_keys import data_keys
from pserver.transport.data_listener import DataListener
from pserver.transport.data_transport import ShardData
from pserver.wire import messages as wire
from pserver.wire import streams
from psrpc.core.batch import BatchId
from psrpc.core.encoding import plain
from psrpc.core.errors import PsError
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import encode_stream
from psrpc.wire.commands import to_batch
from tests.fuzz.calls import Caller, joined, split
from tests.pserver.shards import (
    INCARNATION,
    INITIAL,
    counting,
    engine_of,
    granted,
    part,
    plan_of,
    session_of,
)

PLAN = plan_of(size=24)
BATCH = BatchId(0, 0, 4)
FENCE = types.Fence(
    generation=1,
    policy=1,
    plan_hash=PLAN.hash,
    shard_incarnation=INCARNATION,
    session=session_of("worker-1", ""),
)
SECRET = bytes(range(32))


class Shard:
    """A shard with values."""

    def __init__(self) -> None:
        self.engine: ShardEngine = engine_of(PLAN)
        self.servicer = ParameterServerServicer(lambda: self.engine, 8)
        self.servicer.initialize(iter(initialization()), context())

    def state(self) -> tuple[int, bytes]:
        """Its version, and a digest of its parameters and of what it has applied; at most the batch
        that is granted, and an update for it."""
        report = self.engine.report()
        epochs = self.engine.applied().to_epochs()
        taken = [piece for epoch in epochs for piece in epoch["applied"]]
        assert taken in ([], [[BATCH.first, BATCH.count]], [(BATCH.first, BATCH.count)]), taken
        assert report.version <= len(taken)
        values = self.engine.pull(self.engine.credentials.pull(wire.from_pull(pull()), ""), 0.0)
        digest = hashlib.sha256(repr(epochs).encode())
        for name in sorted(values.arrays):
            digest.update(values.arrays[name].tobytes())
        return report.version, digest.digest()


def context() -> Any:
    """Of a call."""
    return Caller()


def shard_calls(data: bytes) -> None:
    """Any messages to any RPC of a shard are answered or refused, and what is refused has changed
    nothing."""
    shard = Shard()
    parts = list(split(data))
    kind = parts[0][0] if parts else 0
    name, shape = METHODS[kind % len(METHODS)]
    messages = [message for _, message in parts]
    before = shard.state()
    method = getattr(shard.servicer, name)
    try:
        if shape is None:
            found = method(iter(messages), context())
        else:
            found = method(shape.FromString(b"".join(messages)), context())
        if isinstance(found, Iterator):
            # Of a conversation each exchange is by itself.
            for _ in found:
                before = shard.state()
    except DecodeError:
        return
    except PsError:
        assert shard.state() == before, name
        return
    shard.state()


METHODS: tuple[tuple[str, Any], ...] = (
    ("push_gradients", None),
    ("exchange", None),
    ("initialize", None),
    ("pull", pb.PullRequest),
    ("look_up", pb.LookUpRequest),
    ("get_status", pb.GetStatusRequest),
)


def data_port(data: bytes) -> None:
    """Any bytes on a data connection, plain or sealed by one that has its keys, are served or
    refused as in a call; bytes that were not sealed change nothing."""
    shard = Shard()
    how, rest = (data[0] % 3, data[1:]) if data else (0, b"")
    keys = data_keys(SECRET)
    with connected() as (theirs, ours):
        connection = DataConnection(ours, "the worker", None if how == 0 else keys.of_shard)
        if how == 1:
            sender = SealedStream(theirs, *keys.of_worker)
            if rest:
                sender.send([memoryview(rest)])
        else:
            theirs.sendall(rest)
        theirs.shutdown(socket.SHUT_WR)
        before = shard.state()
        conversation = Conversation(shard.engine, ShardData(connection, PLAN))
        try:
            for _ in conversation.answers(lambda: 0.0):
                raise AssertionError("answers go over the connection")
        except PsError:
            pass
        finally:
            connection.close()
        if how == 2:
            assert shard.state() == before, "nothing was sealed"
        shard.state()


def ticket(data: bytes) -> None:
    """Any bytes at the data port of a shard that expects a worker are sent away, and the worker
    that has the secret is let in."""
    listener = _listener()
    expected = listener.expect()
    try:
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            _reset_when_closed(stranger)
            with suppress(OSError):
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        keys = data_keys(expected.secret)
        with socket.create_connection(("127.0.0.1", listener.port)) as worker:
            _reset_when_closed(worker)
            worker.settimeout(10)
            worker.sendall(keys.ticket)
            assert worker.recv(32, socket.MSG_WAITALL) == keys.proof
    finally:
        expected.forget()


@cache
def _listener() -> DataListener:
    listener = DataListener("127.0.0.1", 0, sealed=True)
    listener.start()
    return listener


@cache
def _loopback() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with ExitStack() as stack:
        theirs = stack.enter_context(socket.create_connection(_loopback().getsockname()))
        ours, _ = _loopback().accept()
        stack.enter_context(ours)
        _reset_when_closed(theirs)
        yield theirs, ours


def _reset_when_closed(connection: socket.socket) -> None:
    """Of thousands a second none is to keep its port."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def initialization() -> list[bytes]:
    """Good messages, as of all that follow."""
    values = {name: plain(array) for name, array in counting(PLAN).items()}
    extents = streams.to_extents(shard_extents(PLAN, 0))
    header = pb.InitializeHeader(fence=FENCE, extents=extents, grant=INITIAL)
    return list(encode_stream(header, streams.gradient_parts(PLAN, values)))


def push_header() -> pb.PushHeader:
    """Of the one attempt that is granted."""
    gradient = part(PLAN, counting(PLAN))
    header = pb.PushHeader(
        fence=FENCE,
        batch=to_batch(BATCH),
        attempt=1,
        examples=BATCH.count,
        extents=streams.to_extents(streams.gradient_extents(PLAN, gradient)),
    )
    return granted(header)


def pull() -> pb.PullRequest:
    """Of the newest values."""
    return pb.PullRequest(fence=FENCE, newest=True, encoding=types.ENCODING_PLAIN)


@cache
def shard_seeds() -> tuple[bytes, ...]:
    """A call of each kind."""
    parts = streams.gradient_parts(PLAN, part(PLAN, counting(PLAN)))
    both = pb.ExchangeHeader(push=push_header(), pull=pb.PullRequest(newest=True))
    both.pull.encoding = types.ENCODING_PLAIN
    attach = pb.ExchangeHeader(attach=pb.Attach(pid=1, fd=0, nbytes=1 << 16, nonce=bytes(32)))
    skipped = granted(pb.PushHeader(fence=FENCE, batch=push_header().batch, attempt=1, examples=4))
    skipped.skipped = True
    return (
        _call("push_gradients", encode_stream(push_header(), parts)),
        _call("push_gradients", encode_stream(skipped, ())),
        _call("exchange", encode_stream(both, parts)),
        _call("exchange", encode_stream(pb.ExchangeHeader(pull=pull()), ())),
        _call("exchange", encode_stream(attach, ())),
        _call("exchange", encode_stream(pb.ExchangeHeader(open_data=pb.OpenData()), ())),
        _call("initialize", initialization()),
        _call("pull", [pull().SerializeToString()]),
        _call("look_up", [pb.LookUpRequest(table="t", ids=bytes(8)).SerializeToString()]),
    )


def _call(name: str, messages: Iterable[bytes]) -> bytes:
    kinds = [method for method, _ in METHODS]
    return joined((kinds.index(name), message) for message in messages)


@cache
def data_seeds() -> tuple[bytes, ...]:
    """Exchanges as they travel, plain, sealed, and the first one as if it were a record."""
    tensors = [memoryview(b) for _, b in streams.gradient_parts(PLAN, part(PLAN, counting(PLAN)))]
    push = _framed(pb.ExchangeHeader(push=push_header()), tensors)
    only = _framed(pb.ExchangeHeader(pull=pull()), ())
    return tuple(
        bytes([how]) + exchange for how in range(3) for exchange in (push, only, push + only)
    )


def _framed(header: Message, tensors: Iterable[memoryview]) -> bytes:
    message = header.SerializeToString()
    return len(message).to_bytes(4, "little") + message + b"".join(t.tobytes() for t in tensors)
