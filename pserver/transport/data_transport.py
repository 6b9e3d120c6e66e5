"""The transport over a data connection: messages and tensors go there, and the call only starts and
ends it; see docs/design/0013-data-connection.md."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pserver.core.assembly import PIECE_BYTES, Extent, Seen, pieces, targets
from pserver.transport.byte_stream import RECORD_BYTES
from pserver.transport.data_connection import DataConnection, connect
from pserver.transport.data_listener import DataListener, Expected
from pserver.transport.grpc_stream import Connector, StandingCall
from pserver.transport.transport import (
    Acceptor,
    Arrival,
    NDArray,
    Outgoing,
    PulledValues,
    Sent,
    ShardTransport,
    TransportChoice,
    WorkerTransport,
)
from pserver.wire import streams
from psrpc.core.errors import InvalidArgument, PsError, Unreachable
from psrpc.core.plan import Plan
from psrpc.net.channel import parse_address
from psrpc.ops.logs import get_logger
from psrpc.v1 import parameter_server_pb2 as pb

log = get_logger()

CONNECT_S = 3.0
"""Timeout of opening a data connection. If it passes, for example behind a firewall, the call
carries all tensors."""

WHY_S = 2.0
"""How long to wait until the call ends too and says why. If it does not end, only the data
connection broke."""

# A piece is as long as a record of a sealed connection, so records are decrypted directly into it.
assert PIECE_BYTES == RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Streamed(Arrival):
    """Tensors that follow their header on the data connection, one extent after another without
    gaps."""

    connection: DataConnection

    def receive(
        self,
        plan: Plan,
        extents: Sequence[Extent],
        into: Mapping[str, NDArray],
        rows: Mapping[int, NDArray] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """See :class:`Arrival`.

        Raises:
            Unreachable: the connection ended too soon.
        """
        for extent, target in targets(plan, extents, into, rows):
            assert target.flags.c_contiguous
            assert target.nbytes == extent.nbytes
            flat = target.reshape(-1)
            if seen is None:
                self.connection.receive_into(flat.view(np.uint8).data)
                continue
            for part in pieces(flat):
                self.connection.receive_into(part.view(np.uint8).data)
                seen(extent.arena, part)


class WorkerData(WorkerTransport):
    """The worker's end of a data connection."""

    def __init__(
        self, call: StandingCall, connection: DataConnection, plan: Plan, connector: DataConnector
    ) -> None:
        """``connector`` is told if the connection breaks, and then opens no more."""
        self.choice = TransportChoice("data connection")
        self._call = call
        self._connection = connection
        self._plan = plan
        self._connector = connector
        self._ended = threading.Event()
        call.when_over(self._over)

    def exchange(
        self, header: pb.ExchangeHeader, tensors: Outgoing, sent: Sent
    ) -> tuple[pb.ExchangeAnswer, Arrival]:
        """See :class:`WorkerTransport`."""
        parts = tensors.parts(self._plan)
        self._connection.send(header.SerializeToString(), [part for _, part in parts])
        sent()
        message = self._connection.receive_message()
        if message is None:
            raise Unreachable(f"{self._call.peer} has closed the data connection")
        return streams.parse_header(message, pb.ExchangeAnswer), Streamed(self._connection)

    def failed(self, error: PsError) -> PsError:
        """Returns the error with which the call ended; the data connection itself does not say why
        it ended. If the call has not ended, returns ``error`` and gives up data connections."""
        if not isinstance(error, Unreachable):
            return error
        if not self._ended.wait(WHY_S):
            self._connector.go_without(str(error))
            return error
        try:
            next(self._call.answers())
        except PsError as ended:
            return ended
        return InvalidArgument(f"{self._call.peer} has sent in the call what belongs beside it")

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _over(self) -> None:
        """Ends the exchange on the data connection, because the call has ended."""
        self._ended.set()
        self._connection.hang_up()


class DataConnector(Connector):
    """Opens a data connection for each call of one client. After one failure it opens none any
    more."""

    def __init__(
        self, address: str, peer: str, plan: Plan, deadline_s: float, *, sealed: bool
    ) -> None:
        """``sealed``: whether calls are encrypted."""
        self.why = ""
        self._peer = peer
        self._host, _ = parse_address(address)
        self._plan = plan
        self._timeout_s = min(CONNECT_S, deadline_s)
        self._sealed = sealed
        self._logged = False

    def connect(self, call: StandingCall) -> WorkerData | None:
        """See :class:`Connector`."""
        if self.why:
            return None
        data = call.ask(pb.ExchangeHeader(open_data=pb.OpenData())).data
        if data.refusal:
            self.go_without(data.refusal)
            return None
        try:
            connection = connect(
                self._host, data.port, data.secret, self._peer, self._timeout_s, sealed=self._sealed
            )
        except Unreachable as error:
            self.go_without(str(error))
            return None
        try:
            call.ask(pb.ExchangeHeader(use_data=True))
        except BaseException:
            connection.close()
            raise
        if not self._logged:
            self._logged = True
            log.info("tensors have a connection of their own", peer=self._peer)
        return WorkerData(call, connection, self._plan, self)

    def go_without(self, why: str) -> None:
        """Stops opening data connections, for the reason ``why``."""
        self.why = why
        log.info("tensors share a connection with calls", peer=self._peer, why=why)


class ShardData(ShardTransport):
    """The shard's end of a data connection."""

    def __init__(self, connection: DataConnection, plan: Plan) -> None:
        self._connection = connection
        self._plan = plan

    def receive(self) -> tuple[pb.ExchangeHeader, Arrival] | None:
        """See :class:`ShardTransport`."""
        message = self._connection.receive_message()
        if message is None:
            return None
        return streams.parse_header(message, pb.ExchangeHeader), Streamed(self._connection)

    def answer(self, answer: pb.ExchangeAnswer, pulled: PulledValues | None) -> Iterable[bytes]:
        """See :class:`ShardTransport`."""
        parts = () if pulled is None else pulled.parts(self._plan)
        self._connection.send(answer.SerializeToString(), [part for _, part in parts])
        return ()

    def hang_up(self) -> None:
        """See :class:`ShardTransport`."""
        self._connection.hang_up()

    def close(self) -> None:
        """See :class:`ShardTransport`."""
        self._connection.close()


class DataAcceptor(Acceptor):
    """Offers the worker of one call a data connection, and takes it over when the worker has
    connected."""

    fields = frozenset({"open_data", "use_data"})
    rule = "a data connection is opened once, before any push or pull"

    def __init__(self, listener: DataListener | None, plan: Plan) -> None:
        """``listener``: None if data connections are disabled."""
        self._listener = listener
        self._plan = plan
        self._expected: Expected | None = None

    def accept(
        self, header: pb.ExchangeHeader, present: ShardTransport
    ) -> tuple[pb.ExchangeAnswer, ShardTransport]:
        """See :class:`Acceptor`."""
        if header.use_data:
            expected, self._expected = self._expected, None
            data = None if expected is None else expected.take("the worker")
            if data is None:
                raise InvalidArgument("the call has no data connection; open one first")
            return pb.ExchangeAnswer(data=pb.DataOpened()), ShardData(data, self._plan)
        return pb.ExchangeAnswer(data=self._expect()), present

    def close(self) -> None:
        """See :class:`Acceptor`."""
        if self._expected is not None:
            self._expected.forget()

    def _expect(self) -> pb.DataOpened:
        if self._listener is None:
            return pb.DataOpened(refusal="the shard takes none (--data-connections off)")
        if self._expected is not None:
            raise InvalidArgument("the call expects a data connection already")
        self._expected = self._listener.expect()
        return pb.DataOpened(port=self._expected.port, secret=self._expected.secret)
