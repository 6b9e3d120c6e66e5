"""One ``Exchange`` call, as a worker holds it: open for many steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from queue import SimpleQueue
from typing import Any

import grpc

from pserver import wire
from pserver.mailbox import WorkerBox
from psrpc.codec import Piece, encode_stream
from psrpc.errors import Unreachable
from psrpc.v1 import parameter_server_pb2 as pb

PATH = f"/{wire.SERVICE}/Exchange"


class Session:
    """A standing call. One thread uses it at a time, one exchange after another.

    The call's own deadline is ``2 * deadline_s``. Whoever begins an exchange only while the session
    is :attr:`usable` gives every exchange at least ``deadline_s``, without a clock of its own.
    """

    def __init__(self, channel: grpc.Channel, peer: str, deadline_s: float) -> None:
        self._peer = peer
        # Holds at most the messages of the one exchange that is under way.
        self._outgoing: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        self._aged_at = time.monotonic() + deadline_s
        untyped: Any = channel  # the stubs want serializers; bytes need none
        self._call: Any = untyped.stream_stream(PATH)(self._requests(), timeout=2 * deadline_s)
        self.attached = False
        """Whether the shard has attached this worker's segment."""
        self._box: WorkerBox | None = None

    @property
    def usable(self) -> bool:
        """Whether an exchange may begin: the call is not too old for it, nor known to have ended
        (the connection broke, the shard has left) while nothing was under way."""
        return self._call.is_active() and time.monotonic() < self._aged_at

    def exchange(
        self, header: pb.ExchangeHeader, parts: Sequence[tuple[int, memoryview]]
    ) -> tuple[pb.ExchangeAnswer, Iterator[Piece]]:
        """Carries one exchange out; the answer's chunks have to be read to their end.

        Raises:
            grpc.RpcError: the call has ended, by the shard's word or otherwise.
            Unreachable: the shard has ended it in peace; open another.
            InvalidArgument: the answer is none.
        """
        in_segment = bool(header.pull_at)

        def announced(answer: pb.ExchangeAnswer) -> int:
            return 0 if in_segment else wire.announced_nbytes(answer.pull.extents)

        messages = encode_stream(header, parts)
        if self._box is not None:
            short = not parts and (in_segment or not header.HasField("pull"))
            first = next(messages)
            if short and self._box.fits(first):
                return wire.read_stream(self._left(self._box, first), pb.ExchangeAnswer, announced)
            messages = chain((first,), messages)
        self._outgoing.put(messages)
        if self._box is not None:
            self._box.call_to_stream()
        return wire.read_stream(self._answers(), pb.ExchangeAnswer, announced)

    def leave_in(self, box: WorkerBox) -> None:
        """The shard looks into ``box`` from now on: short messages are left there, and save the
        threads that gRPC wakes on their way."""
        self._box = box
        # The shard may end the call instead of an answer.
        self._call.add_callback(box.wake)

    def close(self) -> None:
        """Ends the call; any thread, any number of times."""
        self._outgoing.put(None)
        self._call.cancel()

    def _requests(self) -> Iterator[bytes]:
        # Runs on a thread of gRPC's.
        while (messages := self._outgoing.get()) is not None:
            yield from messages

    def _left(self, box: WorkerBox, message: bytes) -> Iterator[bytes]:
        answer = box.exchange(message, lambda: not self._call.is_active())
        if answer is None:
            yield from self._answers()
        else:
            yield answer

    def _answers(self) -> Iterator[bytes]:
        yield from self._call
        raise Unreachable(f"{self._peer} has ended the conversation")
