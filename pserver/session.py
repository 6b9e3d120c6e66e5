"""One ``Exchange`` call, as a worker holds it: open for many steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import grpc

from pserver import wire
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
        self._outgoing.put(encode_stream(header, parts))
        in_segment = bool(header.pull_at)

        def announced(answer: pb.ExchangeAnswer) -> int:
            return 0 if in_segment else wire.announced_nbytes(answer.pull.extents)

        return wire.read_stream(self._answers(), pb.ExchangeAnswer, announced)

    def close(self) -> None:
        """Ends the call; any thread, any number of times."""
        self._outgoing.put(None)
        self._call.cancel()

    def _requests(self) -> Iterator[bytes]:
        # Runs on a thread of gRPC's.
        while (messages := self._outgoing.get()) is not None:
            yield from messages

    def _answers(self) -> Iterator[bytes]:
        yield from self._call
        raise Unreachable(f"{self._peer} has ended the conversation")
