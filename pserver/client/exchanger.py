"""Carries out a worker's exchanges with one shard, in one standing call after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import grpc

from pserver.core.assembly import VALUES, Extent, check_extents
from pserver.core.table_ids import check_row_extents
from pserver.transport.data_transport import DataConnector
from pserver.transport.grpc_stream import Connector, StandingCall, WorkerStream
from pserver.transport.transport import (
    Arrival,
    Outgoing,
    Target,
    TransportChoice,
    WorkerTransport,
)
from pserver.transport.worker_memory import MemoryConnector
from pserver.transport.workspace import Workspace
from pserver.wire import streams
from psrpc.core.errors import InvalidArgument, PsError, SegmentLost, Unreachable
from psrpc.core.plan import Plan
from psrpc.v1 import parameter_server_pb2 as pb


class Exchanger:
    """Keeps a call open, chooses its transport, and carries out exchanges. Thread-safe; carries out
    one exchange at a time and connects at the first.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        address: str,
        encrypted: bool,
        peer: str,
        plan: Plan,
        shard: int,
        workspace: Workspace | None,
        deadline_s: float,
        sent: Callable[[], object],
        local: WorkerTransport | None = None,
    ) -> None:
        """Args: see :class:`pserver.client.client.ShardClient`."""
        self._sent = sent
        self._local = local
        self._channel = channel
        self._peer = peer
        self._plan = plan
        self._shard = shard
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._closed = False
        self._call: StandingCall | None = None
        self._transport: WorkerTransport | None = local
        # Why the segment must not be used any more; empty while it may be.
        self._given_up = ""
        self.transport: TransportChoice | None = None
        """How tensors travel; None before the first exchange. Thread-safe."""
        # The fastest first. If none of them connects, tensors go through the call.
        self._connectors: tuple[Connector, ...] = (
            MemoryConnector(workspace, peer, plan, shard),
            DataConnector(address, peer, plan, deadline_s, sealed=encrypted),
        )

    @property
    def attached(self) -> bool:
        """Whether the tensors of the last exchange stayed in shared memory. Thread-safe."""
        # Read once: the exchanging thread may end the call at any moment.
        transport = self._transport
        return transport is not None and transport.choice.kind == "shared memory"

    def close(self) -> None:
        """Ends the call; the current exchange and every later one fail."""
        # Set before `cancel`, because a thread that is just opening a call checks this flag
        # afterwards.
        self._closed = True
        self.cancel()

    def cancel(self) -> None:
        """Ends the call: the current exchange fails, and the next one opens a new call."""
        call, transport = self._call, self._transport
        if call is not None:
            call.close()
        if transport is not None:
            transport.close()

    def carry_out(self, header: pb.ExchangeHeader, tensors: Outgoing) -> pb.ExchangeAnswer:
        """Carries out one exchange, with one try.

        Args:
            header: complete except for the places of the tensors.

        Raises:
            SegmentLost: the shard did not answer this or an earlier exchange, and may still use
                the segment.
            PsError: the shard raised this error, or the error says why the shard is unreachable.
        """
        with self._lock:
            if self._given_up:
                raise SegmentLost(self._given_up)
            try:
                return self._exchange(self._standing(), header, tensors)
            except PsError as error:
                raise self._lost(error) from None
            except BaseException as error:
                # Ends the call first, so that `_lost` does not wait for a reason.
                self.cancel()
                self._lost(Unreachable(f"interrupted by {type(error).__name__}"))
                raise

    def _exchange(
        self, transport: WorkerTransport, header: pb.ExchangeHeader, tensors: Outgoing
    ) -> pb.ExchangeAnswer:
        # An earlier try may have filled these.
        del header.push_at[:], header.pull_at[:]
        answer, arrival = transport.exchange(header, tensors, self._sent)
        try:
            self._receive(answer, arrival, tensors)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self._peer} answered what cannot be used: {error}") from None
        return answer

    def _receive(self, answer: pb.ExchangeAnswer, arrival: Arrival, tensors: Outgoing) -> None:
        into, wanted = tensors.into, tensors.wanted
        if into is None and wanted is None:
            return
        extents = streams.from_extents(answer.pull.extents)
        cut = len(extents)
        if wanted is not None:
            cut = max(0, cut - len(wanted.pairs))
        if into is not None:
            self._check(extents[:cut], into)
        elif cut:
            raise InvalidArgument("arenas came with rows that were asked for alone")
        if wanted is not None:
            check_row_extents(self._plan, extents[cut:], wanted.pairs)
        mine = {} if into is None else into.mine
        arrival.receive(self._plan, extents, mine, None if wanted is None else wanted.into)

    def _check(self, extents: Sequence[Extent], into: Target) -> None:
        if extents == into.extents:
            return
        check_extents(self._plan, self._shard, extents, VALUES)
        for extent in extents:
            name = self._plan.arenas[extent.arena].name
            if extent.nbytes != into.mine[name].nbytes:
                raise InvalidArgument(f"arena {name} came as {extent.encoding}")
        into.extents = extents

    # -- the standing call -------------------------------------------------------------------

    def _standing(self) -> WorkerTransport:
        if self._local is not None:
            if self._closed:
                raise PsError(f"the connection to {self._peer} was closed here")
            self._transport, self.transport = self._local, self._local.choice
            return self._local
        if self._call is not None and self._transport is not None and self._call.usable:
            return self._transport
        self._end_call()
        try:
            call = self._call = StandingCall(self._channel, self._peer, self._deadline_s)
        except ValueError:
            if not self._closed:
                raise
            # gRPC raises a plain ValueError for a closed channel.
            raise PsError(f"the connection to {self._peer} was closed here") from None
        if self._closed:
            call.close()
        transport = self._transport = self._connect(call)
        self.transport = transport.choice
        return transport

    def _connect(self, call: StandingCall) -> WorkerTransport:
        """Chooses the transport of a call."""
        why = ""
        for connector in self._connectors:
            transport = connector.connect(call)
            if transport is not None:
                return transport
            why = connector.why
        return WorkerStream(call, self._plan, why)

    def _lost(self, error: PsError) -> PsError:
        """Ends the call after ``error`` and returns the error to raise."""
        if self._transport is not None:
            error = self._transport.failed(error)
        self._end_call()
        if isinstance(error, SegmentLost):
            self._given_up = str(error)
        return error

    def _end_call(self) -> None:
        self.cancel()
        self._call = self._transport = None
