"""Serves one ``Exchange`` call on the shard: exchange after exchange until one side leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pserver.core.requests import PushResult, RowsRequest, Values
from pserver.core.table_ids import TableIds, from_table_ids
from pserver.engine.engine import ShardEngine
from pserver.transport.data_listener import DataListener
from pserver.transport.data_transport import DataAcceptor
from pserver.transport.shard_memory import MemoryAcceptor
from pserver.transport.transport import Acceptor, Arrival, Places, PulledValues, ShardTransport
from pserver.wire import messages as wire
from pserver.wire import streams
from psrpc.core.errors import InvalidArgument
from psrpc.v1 import parameter_server_pb2 as pb

Answered = tuple[pb.ExchangeAnswer, PulledValues | None]
"""An answer, and the values that it announces."""


class Conversation:
    """Decodes requests, calls the engine, encodes answers; holds the shard's end of the transport.

    For one thread. ``idle`` is True while it waits for the next request; ``leaving``, which any
    thread may set, ends it when it would become idle. :meth:`hang_up` tells it that the call has
    ended."""

    def __init__(
        self,
        engine: ShardEngine,
        stream: ShardTransport,
        certificate: str = "",
        data: DataListener | None = None,
    ) -> None:
        """Args:
        stream: the end within the call, with which it begins.
        certificate: common name of the caller's certificate; empty without certificates.
        data: accepts data connections; None if they are disabled.
        """
        self.idle = True
        self.leaving = False
        self._engine = engine
        self._certificate = certificate
        self._stream = stream
        self._transport = stream
        self._acceptors: tuple[Acceptor, ...] = (
            MemoryAcceptor(engine.plan, engine.identity.shard),
            DataAcceptor(data, engine.plan),
        )
        self._over = False
        self._began = False

    def answers(self, patience_s: Callable[[], float]) -> Iterator[bytes]:
        """Yields the shard's messages of the call; a PsError ends it. ``patience_s`` returns how
        long the call lets an exchange wait from now on."""
        try:
            # The call may have ended before its present transport was there to hang up.
            while not self._over and (request := self._transport.receive()) is not None:
                self.idle = False
                transport = self._transport
                answer, pulled = self._exchange(*request, patience_s())
                yield from transport.answer(answer, pulled)
                # Free up to 2 MiB while waiting for the worker.
                del request, answer, pulled, transport
                # In this order: a thread that sets ``leaving`` reads ``idle`` afterwards.
                self.idle = True
                if self.leaving:
                    return
        finally:
            # After a cut call gRPC keeps an error, and that these frames, until garbage collection:
            # too long for a worker's memory.
            for acceptor in self._acceptors:
                acceptor.close()
            self._transport.close()
            self._transport = self._stream

    def hang_up(self) -> None:
        """Marks the call as over and ends its waits. Any thread may call it."""
        self._over = True
        self._transport.hang_up()

    def _exchange(self, header: pb.ExchangeHeader, arrival: Arrival, patience_s: float) -> Answered:
        if header.patience_ms:
            patience_s = min(patience_s, header.patience_ms / 1000)
        fields = {field.name for field, _ in header.ListFields()}
        pushing, pulling = "push" in fields, "pull" in fields
        for acceptor in self._acceptors:
            if not acceptor.fields.isdisjoint(fields):
                chosen = self._transport is not self._stream
                if pushing or pulling or self._began or chosen:
                    raise InvalidArgument(acceptor.rule)
                answer, self._transport = acceptor.accept(header, self._stream)
                return answer, None
        self._began = True
        if pushing:
            with self._engine.refusals_counted():
                # Before anything changes, since the named places may not exist.
                rows = from_table_ids(header.pull.rows) if header.pull.rows else ()
                places = self._transport.places(header, rows, header.pull.rows_only)
                result, values = self._push(header, arrival, patience_s, rows, places)
            return self._answer(result, values, rows, places)
        if pulling:
            request = self._engine.credentials.pull(wire.from_pull(header.pull), self._certificate)
            places = self._transport.places(header, request.rows, request.rows_only)
            values = self._engine.pull(request, patience_s, places.rows)
            return self._answer(None, values, request.rows, places)
        raise InvalidArgument("an exchange asks for nothing; expected a push, a pull or both")

    def _push(
        self,
        header: pb.ExchangeHeader,
        arrival: Arrival,
        patience_s: float,
        rows: TableIds,
        places: Places,
    ) -> tuple[PushResult, Values | None]:
        request = self._engine.credentials.push(wire.from_push(header.push), self._certificate)
        vouch = self._engine.credentials.vouch
        if not header.HasField("pull"):
            return vouch(request, self._engine.push(request, arrival, patience_s)), None
        if header.pull.WhichOneof("source") != "newest" or header.pull.HasField("decision"):
            raise InvalidArgument("a pull with a push is of the newest values")
        encoding = streams.from_encoding(header.pull.encoding)
        only = header.pull.rows_only
        wanted = RowsRequest(rows, places.rows, only) if rows or only else None
        result, values = self._engine.push_pull(request, arrival, patience_s, encoding, wanted)
        return vouch(request, result), values

    def _answer(
        self, result: PushResult | None, values: Values | None, rows: TableIds, places: Places
    ) -> Answered:
        answer = pb.ExchangeAnswer()
        if result is not None:
            answer.push.CopyFrom(wire.to_push_result(result))
        if values is None:
            return answer, None
        answer.pull.CopyFrom(wire.to_pull_header(self._engine.plan, values, rows))
        return answer, PulledValues(values, rows, places)
