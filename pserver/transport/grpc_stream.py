"""The standing call between a worker and a shard, which is a gRPC stream, and the transport that
sends tensors in it as chunks.

docs/design/0001-one-stream-form.md describes the grammar, docs/design/0006-standing-exchange.md the
call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any, Protocol

import grpc

from pserver.core.assembly import Assembly, Extent, Seen
from pserver.transport.progress import AwaitedMessages, TransferProgress
from pserver.transport.transport import (
    Arrival,
    NDArray,
    Outgoing,
    PulledValues,
    Sent,
    ShardTransport,
    TransportChoice,
    WorkerTransport,
)
from pserver.wire import messages as wire
from pserver.wire import streams
from pserver.wire.streams import Header, parse_header
from psrpc.core.errors import InvalidArgument, Unreachable
from psrpc.core.plan import Plan
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.codec import Piece, encode_stream, parse_message
from psrpc.wire.status import error_from_rpc

PATH = f"/{wire.SERVICE}/Exchange"


class StandingCall:
    """A worker's side of one ``Exchange`` call, which stays open for many steps. One thread uses it
    at a time, one exchange after another.

    The call's deadline is ``2 * deadline_s``, and the call is :attr:`usable` for the first half of
    that. So each exchange that begins while it is usable has at least ``deadline_s``.
    """

    def __init__(self, channel: grpc.Channel, peer: str, deadline_s: float) -> None:
        self.peer = peer
        # Holds at most the messages of the current exchange.
        self._outgoing: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        self._aged_at = time.monotonic() + deadline_s
        untyped: Any = channel  # its type requires serializers; bytes need none
        self._call: Any = untyped.stream_stream(PATH)(self._requests(), timeout=2 * deadline_s)

    @property
    def usable(self) -> bool:
        """Whether an exchange may begin: the call is young enough and has not ended since the last
        exchange (because the connection broke or the shard left)."""
        return self._call.is_active() and time.monotonic() < self._aged_at

    @property
    def over(self) -> bool:
        """Whether the call has ended."""
        return not self._call.is_active()

    def send(self, messages: Iterator[bytes]) -> None:
        """Hands the messages of a request to gRPC."""
        self._outgoing.put(messages)

    def answers(self) -> Iterator[bytes]:
        """Yields the shard's messages.

        Raises:
            Unreachable: the shard ended the call without an error; open another.
            PsError: the call ended with this error.
        """
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.peer) from None
        raise Unreachable(f"{self.peer} has ended the conversation")

    def ask(self, header: pb.ExchangeHeader) -> pb.ExchangeAnswer:
        """Carries out an exchange without tensors. Raises the errors of :meth:`answers`."""
        self.send(encode_stream(header, ()))
        return read_answer(self.answers())[0]

    def when_over(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` on a thread of gRPC when the call ends; immediately if it has
        ended."""
        if not self._call.add_callback(callback):
            callback()

    def close(self) -> None:
        """Ends the call. Thread-safe and idempotent."""
        self._outgoing.put(None)
        self._call.cancel()

    def _requests(self) -> Iterator[bytes]:
        # Runs on a thread of gRPC.
        while (messages := self._outgoing.get()) is not None:
            yield from messages


class Connector(Protocol):
    """Makes the worker's end of one kind of transport for each call of one client.

    Attributes:
        why: why it made no transport for the last call; empty if it made one.
    """

    why: str

    def connect(self, call: StandingCall) -> WorkerTransport | None:
        """Asks the shard, in ``call``, for this kind of transport; returns None if worker or shard
        does not use it. Raises the errors of :meth:`StandingCall.answers`."""


@dataclass(frozen=True, slots=True)
class Chunks(Arrival):
    """Tensors that arrive in chunks; ``pieces`` ends with the last chunk."""

    pieces: Iterable[Piece]

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """See :class:`Arrival`."""
        Assembly(plan, extents, into, rows, seen).accept_all(self.pieces)


class WorkerStream(WorkerTransport):
    """The worker's end of a transport that sends messages and tensors in the call."""

    def __init__(self, call: StandingCall, plan: Plan, why: str) -> None:
        """``why``: see :class:`TransportChoice`."""
        self.choice = TransportChoice("calls", why)
        self._call = call
        self._plan = plan

    def exchange(
        self, header: pb.ExchangeHeader, tensors: Outgoing, sent: Sent
    ) -> tuple[pb.ExchangeAnswer, Arrival]:
        """See :class:`WorkerTransport`."""
        self._call.send(encode_stream(header, tensors.parts(self._plan)))
        sent()
        return read_answer(self._call.answers())


class ShardStream(ShardTransport):
    """The shard's end of a transport that sends messages and tensors in the call."""

    def __init__(self, messages: Iterator[bytes], plan: Plan) -> None:
        """``messages`` are the requests of the call."""
        self._messages = messages
        self._plan = plan

    def receive(self) -> tuple[pb.ExchangeHeader, Arrival] | None:
        """See :class:`ShardTransport`."""
        first = next(self._messages, None)
        if first is None:
            return None
        return read_exchange(chain((first,), self._messages), paced=True)

    def answer(self, answer: pb.ExchangeAnswer, pulled: PulledValues | None) -> Iterable[bytes]:
        """See :class:`ShardTransport`."""
        return encode_stream(answer, () if pulled is None else pulled.parts(self._plan))


def read_exchange(
    messages: Iterator[bytes], *, paced: bool = False
) -> tuple[pb.ExchangeHeader, Arrival]:
    """Returns a request with its tensors; for ``paced`` see :func:`read_stream`."""

    def announced(header: pb.ExchangeHeader) -> int:
        return 0 if header.push_at else streams.announced_nbytes(header.push.extents)

    header, pieces = read_stream(messages, pb.ExchangeHeader, announced, paced=paced)
    return header, Chunks(pieces)


def read_answer(
    messages: Iterator[bytes], *, in_place: bool = False
) -> tuple[pb.ExchangeAnswer, Arrival]:
    """Returns an answer with its tensors. With ``in_place`` no chunks may follow the answer."""

    def announced(answer: pb.ExchangeAnswer) -> int:
        return 0 if in_place else streams.announced_nbytes(answer.pull.extents)

    answer, pieces = read_stream(messages, pb.ExchangeAnswer, announced)
    return answer, Chunks(pieces)


def read_stream(
    messages: Iterator[bytes],
    header: type[Header],
    announced: Callable[[Header], int] | None = None,
    *,
    paced: bool = False,
) -> tuple[Header, Iterator[Piece]]:
    """Returns the header of a tensor stream, and its chunks as they arrive.

    Args:
        announced: returns the number of chunk bytes that follow a header. None if the stream
            contains only one header and ends after its chunks.
        paced: chunks must arrive as fast as :class:`pserver.transport.progress.TransferProgress`
            demands, from the moment when the caller asks for the first.

    Raises:
        InvalidArgument: a header is missing, or bytes are malformed. The returned iterator raises
            it, too.
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
