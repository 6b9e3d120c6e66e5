"""A worker's side of one ``Exchange`` call, which stays open for many steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from queue import SimpleQueue
from typing import Any

import grpc

from pserver.transport.arrival import Arrival, Chunks, Streamed
from pserver.transport.data_connection import DataConnection
from pserver.transport.mailbox import WorkerBox
from pserver.wire import messages as wire
from pserver.wire import streams
from psrpc.core.errors import InvalidArgument, PsError, Unreachable
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.codec import encode_stream
from psrpc.wire.status import error_from_rpc

PATH = f"/{wire.SERVICE}/Exchange"

WHY_S = 2.0
"""How long to wait for the call to say why its data connection ended; without a word by then the
connection itself broke."""


class ExchangeSession:
    """A standing call. One thread uses it at a time, one exchange after another.

    The call's deadline is ``2 * deadline_s``. A caller that begins exchanges only while the session
    is :attr:`usable` gives each at least ``deadline_s``, without a clock of its own.
    """

    def __init__(self, channel: grpc.Channel, peer: str, deadline_s: float) -> None:
        self._peer = peer
        # Holds at most the messages of the current exchange.
        self._outgoing: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        self._aged_at = time.monotonic() + deadline_s
        untyped: Any = channel  # its type requires serializers; bytes need none
        self._call: Any = untyped.stream_stream(PATH)(self._requests(), timeout=2 * deadline_s)
        self.attached = False
        """Whether the shard has attached this worker's segment."""
        self._box: WorkerBox | None = None
        self._data: DataConnection | None = None
        self._ended = threading.Event()
        self.data_broke = False
        """Whether the data connection ended while the call went on."""

    @property
    def usable(self) -> bool:
        """Whether an exchange may begin: the call is young enough, and has not ended between
        exchanges (the connection broke, the shard left)."""
        return self._call.is_active() and time.monotonic() < self._aged_at

    def exchange(
        self,
        header: pb.ExchangeHeader,
        parts: Sequence[tuple[int, memoryview]],
        sent: Callable[[], object] = lambda: None,
    ) -> tuple[pb.ExchangeAnswer, Arrival]:
        """Carries out one exchange; the caller has to receive all tensors of the answer. Calls
        ``sent`` when the request is sent, or handed to gRPC, and the wait for the answer begins.

        Raises:
            grpc.RpcError: the call ended with an error.
            Unreachable: the shard ended the call in good order; open another. With a data
                connection, :meth:`reason` says what happened.
            InvalidArgument: the message is not an answer.
        """
        if self._data is not None:
            return self._exchange_data(self._data, header, parts, sent)
        in_segment = bool(header.pull_at)

        def announced(answer: pb.ExchangeAnswer) -> int:
            return 0 if in_segment else streams.announced_nbytes(answer.pull.extents)

        messages = encode_stream(header, parts)
        if self._box is not None:
            short = not parts and (in_segment or not header.HasField("pull"))
            first = next(messages)
            if short and self._box.fits(first):
                return _read(self._left(self._box, first, sent), announced)
            messages = chain((first,), messages)
        self._outgoing.put(messages)
        if self._box is not None:
            self._box.call_to_stream()
        sent()
        return _read(self._answers(), announced)

    def leave_in(self, box: WorkerBox) -> None:
        """Sends short messages through ``box`` from now on, which the shard watches; this avoids
        the thread switches of gRPC."""
        self._box = box
        # The shard may end the call instead of answering.
        self._call.add_callback(box.wake)

    def use_data(self, connection: DataConnection) -> None:
        """Carries out all exchanges on ``connection`` from now on, and closes it with the
        session."""
        self._data = connection
        if not self._call.add_callback(self._over):
            self._over()

    def close(self) -> None:
        """Ends the call. Thread-safe and idempotent."""
        self._outgoing.put(None)
        self._call.cancel()
        if self._data is not None:
            self._data.close()

    def reason(self, error: PsError) -> PsError:
        """Returns why an exchange ended with ``error``: the status of the call, if it has ended,
        since the data connection carries none."""
        if self._data is None:
            return error
        if not self._ended.wait(WHY_S):
            self.data_broke = True
            return error
        try:
            next(self._answers())
        except grpc.RpcError as ended:
            return error_from_rpc(ended, self._peer)
        except Unreachable as ended:
            return ended
        return InvalidArgument(f"{self._peer} has sent in the call what belongs beside it")

    def _over(self) -> None:
        """Ends the exchange on the data connection, because the call has ended."""
        self._ended.set()
        if self._data is not None:
            self._data.hang_up()

    def _requests(self) -> Iterator[bytes]:
        # Runs on a thread of gRPC's.
        while (messages := self._outgoing.get()) is not None:
            yield from messages

    def _exchange_data(
        self,
        connection: DataConnection,
        header: pb.ExchangeHeader,
        parts: Sequence[tuple[int, memoryview]],
        sent: Callable[[], object],
    ) -> tuple[pb.ExchangeAnswer, Arrival]:
        connection.send(header.SerializeToString(), [part for _, part in parts])
        sent()
        message = connection.receive_message()
        if message is None:
            raise Unreachable(f"{self._peer} has closed the data connection")
        return streams.parse_header(message, pb.ExchangeAnswer), Streamed(connection)

    def _left(self, box: WorkerBox, message: bytes, sent: Callable[[], object]) -> Iterator[bytes]:
        answer = box.exchange(message, lambda: not self._call.is_active(), sent)
        if answer is None:
            yield from self._answers()
        else:
            yield answer

    def _answers(self) -> Iterator[bytes]:
        yield from self._call
        raise Unreachable(f"{self._peer} has ended the conversation")


def _read(
    messages: Iterator[bytes], announced: Callable[[pb.ExchangeAnswer], int]
) -> tuple[pb.ExchangeAnswer, Arrival]:
    answer, pieces = streams.read_stream(messages, pb.ExchangeAnswer, announced)
    return answer, Chunks(pieces)
