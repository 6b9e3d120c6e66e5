"""The exchanges of a worker with a slice that it hosts itself: calls of the slice's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pserver.core.assembly import Extent, Seen
from pserver.engine.engine import ShardEngine
from pserver.server.servicer import Conversation
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
from psrpc.core.encoding import Gradient
from psrpc.core.errors import InvalidArgument, Unreachable
from psrpc.core.plan import Plan
from psrpc.net.limits import NO_DEADLINE_S
from psrpc.v1 import parameter_server_pb2 as pb


class OwnProcess(WorkerTransport):
    """Both ends of the exchanges with a slice of this process. A header and its session are checked
    as those of every other worker; tensors are copied once, between the worker's arrays and those
    of the engine.

    One thread exchanges, for as long as the slice lives; any thread may call :meth:`close`, which
    ends the wait of the present exchange.
    """

    def __init__(
        self, engine: ShardEngine, peer: str, certificate: str, ended: Callable[[], bool]
    ) -> None:
        """``peer`` names the slice in errors, ``certificate`` is the common name of the worker's
        certificate, ``ended`` says whether the slice takes no more exchanges."""
        self.choice = TransportChoice("own process")
        self._engine = engine
        self._peer = peer
        self._ended = ended
        self._certificate = certificate
        self._end = _NoStream()
        self._conversation: Conversation | None = None

    def exchange(
        self, header: pb.ExchangeHeader, tensors: Outgoing, sent: Sent
    ) -> tuple[pb.ExchangeAnswer, Arrival]:
        """See :class:`WorkerTransport`."""
        if self._ended():
            raise Unreachable(f"{self._peer}, in this process, has ended")
        if tensors.rows or (tensors.wanted is not None and tensors.wanted.ids):
            raise InvalidArgument("a slice has no rows of tables")
        # Another one, since `close` may have ended the wait of the last.
        conversation = self._conversation = Conversation(self._engine, self._end, self._certificate)
        sent()
        arrival = _Lent({} if tensors.gradient is None else tensors.gradient)
        answer, pulled = conversation.exchange(header, arrival, NO_DEADLINE_S)
        return answer, _Taken(pulled)

    def close(self) -> None:
        """See :class:`WorkerTransport`."""
        if self._conversation is not None:
            self._conversation.hang_up()
            self._engine.commands.wake()


@dataclass(frozen=True, slots=True)
class _Lent(Arrival):
    """The worker's own arrays with the gradient to push. An arena has one for each buffer that the
    slice's part of it lies in, and none if the slice has no part of it. Their sizes were checked
    with the header."""

    gradient: Gradient

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,  # noqa: ARG002
        seen: Seen | None = None,  # noqa: ARG002
    ) -> None:
        """See :class:`Arrival`."""
        for extent in extents:
            name, at = plan.arenas[extent.arena].name, 0
            raw = into[name].view(np.uint8)
            for part in self.gradient[name].parts:
                np.copyto(raw[at : at + part.nbytes], part.view(np.uint8))
                at += part.nbytes


@dataclass(frozen=True, slots=True)
class _Taken(Arrival):
    """The values that the engine lends, from which the worker copies."""

    pulled: PulledValues | None

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,  # noqa: ARG002
        seen: Seen | None = None,  # noqa: ARG002
    ) -> None:
        """See :class:`Arrival`."""
        if self.pulled is None:
            raise InvalidArgument("the answer to a push has no values")
        for extent in extents:
            name = plan.arenas[extent.arena].name
            np.copyto(into[name].view(np.uint8), self.pulled.values.arrays[name].view(np.uint8))


class _NoStream(ShardTransport):
    """The shard's end: messages are passed as they are."""

    def receive(self) -> tuple[pb.ExchangeHeader, Arrival] | None:
        """See :class:`ShardTransport`."""
        return None

    def answer(self, answer: pb.ExchangeAnswer, pulled: PulledValues | None) -> Iterable[bytes]:  # noqa: ARG002
        """See :class:`ShardTransport`."""
        return ()
