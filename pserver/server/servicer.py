"""The ParameterServer service: decodes requests, calls the engine, encodes answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import TIMEOUT_MAX, Event, Timer

import grpc

from pserver.core.requests import PullRequest, PushResult, RowsRequest, Values
from pserver.core.table_ids import TableIds, from_bytes, from_table_ids
from pserver.engine.engine import ShardEngine
from pserver.transport.data_listener import DataListener
from pserver.transport.data_transport import DataAcceptor
from pserver.transport.grpc_stream import Chunks, ShardStream, read_stream
from pserver.transport.shard_memory import MemoryAcceptor
from pserver.transport.transport import Acceptor, Arrival, Places, PulledValues, ShardTransport
from pserver.wire import messages as wire
from pserver.wire import streams
from psrpc.core.errors import InvalidArgument, NotReady
from psrpc.net.limits import LONGEST_CALL_S, NO_DEADLINE_S
from psrpc.security.peer_certificate import peer_of
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.codec import encode_stream
from psrpc.wire.shard_reports import to_workers

Answered = tuple[pb.ExchangeAnswer, PulledValues | None]
"""An answer, and the values that it announces."""


class Conversation:
    """Serves the requests of one standing call, through the shard's end of its transport. One
    thread uses it.

    ``idle`` is True while it waits for the next request. Any thread may set ``leaving``; the
    conversation then ends instead of becoming idle. :meth:`hang_up` tells it that the call has
    ended."""

    def __init__(
        self,
        engine: ShardEngine,
        stream: ShardTransport,
        certificate: str = "",
        data: DataListener | None = None,
    ) -> None:
        """Args:
        stream: the shard's end of the gRPC stream; the conversation begins with it.
        certificate: common name of the caller's certificate; empty without certificates.
        data: accepts data connections; None if they are disabled.
        """
        self.idle = True
        self.leaving = False
        self._engine = engine
        self._certificate = certificate
        self._stream = self._transport = stream
        self._acceptors: tuple[Acceptor, ...] = (
            MemoryAcceptor(engine.plan, engine.identity.shard),
            DataAcceptor(data, engine.plan),
        )
        self._over = Event()
        self._began = False

    def answers(self, patience_s: Callable[[], float]) -> Iterator[bytes]:
        """Yields the messages that the shard sends in the call; a PsError ends the call.
        ``patience_s`` returns how long an exchange may wait from now on."""
        try:
            # `_over`: the call may have ended before `hang_up` could reach the present transport.
            while not self._over.is_set() and (request := self._transport.receive()) is not None:
                self.idle = False
                transport = self._transport
                answer, pulled = self.exchange(*request, patience_s())
                yield from transport.answer(answer, pulled)
                # Frees up to 2 MiB before the wait for the worker.
                del request, answer, pulled, transport
                # In this order: another thread sets ``leaving`` and then reads ``idle``, so one of
                # both notices.
                self.idle = True
                if self.leaving:
                    return
        finally:
            # After a cancelled call gRPC keeps an error, and that these frames, until garbage
            # collection; without this, a worker's memory would stay mapped too long.
            for acceptor in self._acceptors:
                acceptor.close()
            self._transport.close()
            self._transport = self._stream

    def hang_up(self) -> None:
        """Marks the call as over and ends its waits. Any thread may call it."""
        self._over.set()
        self._transport.hang_up()

    def exchange(self, header: pb.ExchangeHeader, arrival: Arrival, patience_s: float) -> Answered:
        """Serves one request, within ``patience_s``. Raises PsError."""
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
                # Before the push changes anything, since the named places may not exist.
                rows = from_table_ids(header.pull.rows) if header.pull.rows else ()
                places = self._transport.places(header, rows, header.pull.rows_only)
                result, values = self._push(header, arrival, patience_s, rows, places)
            return self._answer(result, values, rows, places)
        if pulling:
            pull = wire.from_pull(header.pull, self._over.is_set)
            request = self._engine.credentials.pull(pull, self._certificate)
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
        engine, vouch = self._engine, self._engine.credentials.vouch
        request = engine.credentials.push(wire.from_push(header.push), self._certificate)
        if not header.HasField("pull"):
            return vouch(request, engine.push(request, arrival, patience_s)), None
        source = header.pull.WhichOneof("source")
        if source not in ("newest", "round") or header.pull.HasField("decision"):
            raise InvalidArgument("a pull with a push is of the newest values or of a round")
        encoding, only = streams.from_encoding(header.pull.encoding), header.pull.rows_only
        if source == "newest":
            wanted = RowsRequest(rows, places.rows, only) if rows or only else None
            clock = engine.credentials.clock_of(request, wire.clock_of(header.pull))
            result, values = engine.push_pull(request, arrival, patience_s, encoding, wanted, clock)
        else:
            number, fence, worker = header.pull.round, request.fence, request.worker
            over = self._over.is_set
            pull = PullRequest(fence, worker, number, None, encoding, rows, only, gone=over)
            result, at_once = engine.push_round(request, arrival, patience_s, pull, places.rows)
            values = at_once or engine.pull(pull, patience_s, places.rows)
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


Context = grpc.ServicerContext


def patience_s(context: Context) -> float:
    """Returns how long a call may wait in the shard so that an error still reaches the caller
    before the deadline."""
    left = context.time_remaining()
    if _endless(left):
        return NO_DEADLINE_S / 2
    left = min(left, LONGEST_CALL_S)
    return max(0.0, left - min(0.5, left / 10))


def _endless(left_s: float) -> bool:
    """Whether the call has no deadline: gRPC then reports 10^18 s, more than Python can wait."""
    return left_s > TIMEOUT_MAX


@contextmanager
def _ending(context: Context) -> Iterator[None]:
    """Limits the duration of a call. Otherwise a stalled client without a deadline, or with one of
    days, would occupy a thread forever, and during a push also a buffer."""
    left = context.time_remaining()
    if left <= LONGEST_CALL_S:
        yield
        return
    timer = Timer(NO_DEADLINE_S if _endless(left) else LONGEST_CALL_S, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class ParameterServerServicer:
    """Has one method per RPC; protos/psrpc/v1/parameter_server.proto describes them.

    ``engine`` returns the shard's engine, or raises NotReady while there is none. At most
    ``conversations`` are open at once, so that threads are left for other calls. ``data`` accepts
    their data connections."""

    def __init__(
        self,
        engine: Callable[[], ShardEngine],
        conversations: int,
        data: DataListener | None = None,
    ) -> None:
        self._engine = engine
        self._data = data
        self._most_conversations = conversations
        self._conversations: dict[Conversation, Context] = {}

    def close(self) -> None:
        """Ends idle conversations; the others end after their present exchange."""
        for conversation, context in list(self._conversations.items()):
            conversation.leaving = True
            if conversation.idle:
                context.cancel()  # type: ignore[no-untyped-call]  # grpc's

    def initialize(self, requests: Iterator[bytes], context: Context) -> pb.InitializeResponse:
        engine = self._engine()
        with _ending(context):
            header, pieces = read_stream(requests, pb.InitializeHeader, paced=True)
            said, certificate = wire.from_initialize(header), peer_of(context).name
            request = engine.credentials.initialize(said, certificate)
            version, already = engine.initialize(request, Chunks(pieces), patience_s(context))
        return pb.InitializeResponse(version=version, already=already)

    def pull(self, request: pb.PullRequest, context: Context) -> Iterator[bytes]:
        engine = self._engine()
        with _ending(context):
            wanted = engine.credentials.pull(wire.from_pull(request), peer_of(context).name)
            values = engine.pull(wanted, patience_s(context))
            header = wire.to_pull_header(engine.plan, values, wanted.rows)
            yield from encode_stream(header, streams.value_parts(engine.plan, values, wanted.rows))

    def push_gradients(
        self, requests: Iterator[bytes], context: Context
    ) -> pb.PushGradientsResponse:
        engine = self._engine()
        with _ending(context), engine.refusals_counted():
            header, pieces = read_stream(requests, pb.PushHeader, paced=True)
            push = engine.credentials.push(wire.from_push(header), peer_of(context).name)
            held = engine.push(push, Chunks(pieces), patience_s(context))
            result = wire.to_push_result(engine.credentials.vouch(push, held))
        return pb.PushGradientsResponse(result=result)

    def exchange(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        engine = self._engine()
        stream = ShardStream(requests, engine.plan)
        conversation = Conversation(engine, stream, peer_of(context).name, self._data)
        with _ending(context), self._present(conversation, context):
            if not context.add_callback(conversation.hang_up):
                return
            yield from conversation.answers(lambda: patience_s(context))

    def look_up(self, request: pb.LookUpRequest, _context: Context) -> pb.LookUpResponse:
        ids = from_bytes(request.ids, f"table {request.table!r}")
        return streams.to_looked_up(self._engine().look_up(request.table, ids))

    def get_status(self, _request: pb.GetStatusRequest, _context: Context) -> pb.GetStatusResponse:
        engine = self._engine()
        report, identity = engine.report(), engine.identity
        return pb.GetStatusResponse(
            shard=identity.shard,
            incarnation=identity.incarnation,
            generation=report.generation,
            policy=identity.policy,
            version=report.version,
            initialized=report.initialized,
            nbytes=report.nbytes,
            applied=report.counters.applied,
            already_applied=report.counters.already_applied,
            staged=report.counters.staged,
            skipped=report.counters.skipped,
            refused=report.counters.refused,
            staleness_counts=report.counters.staleness,
            staged_now=report.staged_now,
            waiting_for=report.waiting_for,
            workers=to_workers(report.counters.workers),
            too_stale=report.counters.too_stale,
            uncompensated=report.counters.uncompensated,
            apply_s=report.counters.apply_s,
            settings=str(identity.settings),
            tables=streams.to_tables(engine.table_figures()),
        )

    @contextmanager
    def _present(self, conversation: Conversation, context: Context) -> Iterator[None]:
        held = len(self._conversations)
        if held >= self._most_conversations:
            raise NotReady(f"the shard holds {held} conversations already; it waits for one to end")
        self._conversations[conversation] = context
        try:
            yield
        finally:
            del self._conversations[conversation]
