"""The interfaces of a transport, which carries the exchanges of one standing call.

A call begins on its gRPC stream. The worker's connectors, in order, then ask the shard for a faster
transport, and the shard's acceptors answer. Each makes its end of the transport, and all later
exchanges of the call go through these two ends. No other module depends on which kind of transport
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import Extent, Seen
from pserver.core.requests import Values
from pserver.core.table_ids import RowsWanted, TableIds, pairs
from pserver.wire import streams
from pserver.wire.streams import pushed_parts
from psrpc.core.encoding import Encoding, Gradient
from psrpc.core.errors import InvalidArgument, PsError
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.v1 import parameter_server_pb2 as pb

NDArray = npt.NDArray[Any]

Parts = list[tuple[int, memoryview]]
"""Tensors to send as pairs of extent index and bytes."""

Sent = Callable[[], object]
"""Callback for the moment when a request is sent, or handed to gRPC, and the wait for its answer
begins."""


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """How tensors travel between a worker and a shard. If ``kind`` is ``calls``, ``why`` says why
    no faster way works."""

    kind: Literal["own process", "shared memory", "data connection", "calls"]
    why: str = ""


class Arrival(Protocol):
    """The tensors that a header announces."""

    def in_place(
        self,
        plan: Plan,  # noqa: ARG002  # for implementations
        extents: Sequence[Extent],  # noqa: ARG002
        tables: int,  # noqa: ARG002
    ) -> tuple[Mapping[str, NDArray], Sequence[NDArray]] | None:
        """Returns tensors that the worker has left in shared memory: arena name -> ``[nbytes]
        uint8``, and the same per table. Returns None if they have to be received.

        Args:
            tables: the number of tables whose rows are the last extents.
        """
        return None

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Receives the tensors into ``into``, arena name -> array of the announced bytes, and into
        ``rows``, table -> array. If tensors arrive piece by piece, passes each part once to
        ``seen``.

        Raises:
            InvalidArgument: the received bytes are not those announced.
        """


# -- the worker's end ----------------------------------------------------------------------------


@dataclass(slots=True)
class Target:
    """The destination of pulled values: a shard's part of a worker's arrays.

    Attributes:
        mine: arena name -> contiguous ``[shard length]``, in its dtype on the wire.
        encoding: the encoding of the encodable arenas.
        places: offsets of the arrays in the worker's segment, in the plan's order. Empty if they
            are outside it; None until they are computed.
        extents: the last checked extents of an answer; None before the first.
    """

    mine: Mapping[str, NDArray]
    encoding: Encoding
    places: list[int] | None = None
    extents: Sequence[Extent] | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The tensors of an exchange.

    Attributes:
        gradient: the gradient of the push; None without a push or with a skipped one.
        into: destination of the pulled values; None if the pull has no arenas.
        rows: row gradients of the push.
        wanted: the rows of the pull.
    """

    gradient: Gradient | None = None
    into: Target | None = None
    rows: Mapping[int, Rows] = field(default_factory=dict)
    wanted: RowsWanted | None = None

    @property
    def pushed(self) -> TableIds:
        """The ids that have row gradients."""
        return pairs({table: rows.ids for table, rows in self.rows.items()}) if self.rows else ()

    def parts(self, plan: Plan) -> Parts:
        """Returns the tensors to send for the push."""
        if self.gradient is None:
            return []
        parts = streams.gradient_parts(plan, self.gradient)
        return [*parts, *pushed_parts(plan, self.pushed, self.rows)] if self.rows else parts


class WorkerTransport(Protocol):
    """The worker's end. One thread uses it; any thread may call :meth:`close`."""

    choice: TransportChoice

    def exchange(
        self, header: pb.ExchangeHeader, tensors: Outgoing, sent: Sent
    ) -> tuple[pb.ExchangeAnswer, Arrival]:
        """Carries out one exchange. The caller must receive all tensors of the answer before the
        next exchange.

        Args:
            header: complete except for the places of tensors.

        Raises:
            Unreachable, DeadlinePassed: there is no answer.
            InvalidArgument: the message is not an answer.
            PsError: the shard raised this error.
        """

    def failed(self, error: PsError) -> PsError:
        """Returns the error to raise after an exchange that ended with ``error``. The call is not
        used any more."""
        return error

    def close(self) -> None:
        """Releases the resources of this end, except the call. Thread-safe and idempotent."""
        return


# -- the shard's end -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Places:
    """The places in shared memory for the values of a pull: uint8 for arenas and float32 ``[n,
    width]`` for tables. None if the values are sent instead."""

    arenas: Sequence[NDArray] | None = None
    rows: tuple[npt.NDArray[np.float32], ...] | None = None


SENT = Places()


@dataclass(frozen=True, slots=True)
class PulledValues:
    """The values that an answer announces, and the ids of their rows."""

    values: Values
    rows: TableIds
    places: Places

    def parts(self, plan: Plan) -> Parts:
        """Returns the tensors to send for the pull."""
        if self.places.arenas is not None:
            return []
        return streams.value_parts(plan, self.values, self.rows)


class ShardTransport(Protocol):
    """The shard's end. One thread uses it; any thread may call :meth:`hang_up`."""

    def receive(self) -> tuple[pb.ExchangeHeader, Arrival] | None:
        """Waits for the next request; None at the end of the call.

        Raises:
            InvalidArgument: the request is malformed.
        """

    def places(
        self,
        header: pb.ExchangeHeader,
        rows: TableIds,  # noqa: ARG002  # for implementations
        rows_only: bool,  # noqa: ARG002
    ) -> Places:
        """Returns the places for the pulled values. Called before the push is applied, so that a
        wrong request changes nothing.

        Raises:
            InvalidArgument: the request names places that do not exist.
        """
        for what, places in (("push", header.push_at), ("pull", header.pull_at)):
            if places:
                raise InvalidArgument(f"the {what} lies in a segment, and none is attached")
        return SENT

    def answer(self, answer: pb.ExchangeAnswer, pulled: PulledValues | None) -> Iterable[bytes]:
        """Sends an answer and its tensors. Returns the messages that the caller still has to send
        in the call."""

    def hang_up(self) -> None:
        """Ends the wait in :meth:`receive`, because the call has ended. Any thread may call it."""
        return

    def close(self) -> None:
        """Releases the resources of this end, except the call."""
        return


class Acceptor(Protocol):
    """Makes the shard's end of one kind of transport for one call.

    Attributes:
        fields: the fields of ``ExchangeHeader`` that ask for this kind.
        rule: says when a worker may ask for it; the error message if it asks at another time.
    """

    fields: frozenset[str]
    rule: str

    def accept(
        self, header: pb.ExchangeHeader, present: ShardTransport
    ) -> tuple[pb.ExchangeAnswer, ShardTransport]:
        """Returns the answer and the end for later exchanges; the answer itself still goes through
        ``present``.

        Raises:
            InvalidArgument: the request is not possible in this state.
        """

    def close(self) -> None:
        """Stops waiting for a worker that was offered this kind."""
        return
