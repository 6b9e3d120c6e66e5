"""How simulated processes call: the real clients, over the simulated network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from coordinator.client.client import CoordinatorClient
from coordinator.client.command_stream import CommandStream
from pserver.client.client import ShardClient
from pserver.client.exchanger import Exchanger
from pserver.core.requests import PushRequest, Values
from pserver.core.table_ids import RowsWanted, from_table_ids
from pserver.transport.grpc_stream import read_stream
from pserver.transport.transport import Outgoing, Target, WorkerTransport
from pserver.transport.workspace import Workspace
from pserver.wire import messages as wire
from psrpc.core.errors import (
    CoordinatorUnreachable,
    DeadlinePassed,
    PsError,
    SegmentLost,
    Unreachable,
)
from psrpc.core.plan import Plan
from psrpc.security.credentials import PLAINTEXT
from psrpc.v1 import coordinator_pb2 as commands
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.commands import from_clock
from tests.sim.fibers import Fibers
from tests.sim.network import CALL_S, COORDINATOR, EXCHANGE_S, Call, Network
from tests.sim.schedule import Process
from tests.sim.service import Tensors
from tests.sim.stream import Stream
from tests.sim.witness import ARENA

if TYPE_CHECKING:
    from tests.sim.worker import Worker

Response = TypeVar("Response", bound=Message)


class ToCoordinator(CoordinatorClient):
    """Calls of a shard or a worker to its coordinator."""

    def __init__(
        self,
        network: Network,
        process: Process,
        fibers: Fibers,
        answered: Callable[[str, Any], object] = lambda _method, _answer: None,
        clocks: bool = True,
    ) -> None:
        """``answered`` sees each answer, with the method that was called; ``clocks`` is whether
        the worker knows clocks of ssp."""
        self._clocks = clocks
        self.address = COORDINATOR
        self.security = PLAINTEXT
        self.reached = False
        self.refusal = ""
        self._network = network
        self._process = process
        self._fibers = self.threads = fibers
        self._answered = answered
        self._under_way: dict[Call, None] = {}
        self._stub: Any = _Names()

    def close(self) -> None:
        self._closed = True
        for call in list(self._under_way):
            call.give_up()

    def why_unreachable(self) -> PsError | None:
        return None

    def watch(self, request: commands.WatchRequest) -> CommandStream:

        def opened() -> Stream:
            stream: Stream = self._answer("Watch", (request, self._process), CALL_S)
            return stream

        return _Commands(opened, self._fibers)

    def _call(
        self, method: Any, request: Message, expected: type[Response], timeout_s: float
    ) -> Response:
        if not self._clocks and isinstance(request, commands.LeaseWorkRequest):
            request.clocks = False
        response = self._answer(method, request, timeout_s)
        assert isinstance(response, expected)
        self.reached = True
        self._answered(method, response)
        return response

    def _answer(self, method: str, request: Any, timeout_s: float) -> Any:
        call = self._network.call(COORDINATOR, method, request, timeout_s, self._under_way)
        try:
            return self._fibers.wait(call)
        except Unreachable as error:
            raise _unreachable(error) from None


class _Commands(CommandStream):
    """The commands for a shard, on a stream that may break."""

    def __init__(self, opened: Callable[[], Stream], fibers: Fibers) -> None:
        self._cancelled = False
        self._opened = opened
        self._fibers = fibers
        self._stream: Stream | None = None

    def __iter__(self) -> Iterator[commands.WatchResponse]:
        try:
            self._stream = self._opened()
            if self._cancelled:
                self._stream.cancel()
            while True:
                yield self._fibers.wait(self._stream.receive())
        except Unreachable as error:
            if not self._cancelled:
                raise _unreachable(error) from None

    def cancel(self) -> None:
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


def _unreachable(error: Unreachable) -> CoordinatorUnreachable:
    unreachable = CoordinatorUnreachable(str(error))
    unreachable.sent = error.sent
    return unreachable


class _Names:
    """The methods of a stub, which are their names here."""

    def __getattr__(self, name: str) -> str:
        return name


class ToShard(ShardClient):
    """Calls of a worker to one shard."""

    def __init__(self, worker: Worker, *args: Any, **options: Any) -> None:
        self._worker = worker
        super().__init__(*args, **options)

    def _open(self, address: str, workspace: Workspace | None, sent: Callable[[], object]) -> None:
        exchanger: Any = _Exchanger(self._worker, address, self._shard, sent)
        self._exchanger = self._channel = exchanger
        if self.local is not None:
            own: Any = _OwnExchanger(self._worker, self._shard, self._plan, sent, self.local)
            self._exchanger = own
        self._initialize = exchanger.initialize
        self._get_status = exchanger.get_status


class _OwnExchanger(Exchanger):
    """The real one, for a slice of the worker's own process; looks at what comes of it."""

    def __init__(
        self,
        worker: Worker,
        shard: int,
        plan: Plan,
        sent: Callable[[], object],
        local: WorkerTransport,
    ) -> None:
        channel: Any = None
        name = f"shard {shard}"
        super().__init__(channel, "own:1", False, name, plan, shard, None, EXCHANGE_S, sent, local)
        self._worker = worker

    def carry_out(self, header: pb.ExchangeHeader, tensors: Outgoing) -> pb.ExchangeAnswer:
        # A second one would wait for the lock, which no other thread could let go.
        assert not self._lock.locked(), f"two exchanges at once with {self._peer}"
        worker = self._worker
        if header.HasField("push"):
            worker.source.check_base(self._shard, wire.from_push(header.push))
        answer = super().carry_out(header, tensors)
        worker.cluster.counts["calls of own slices"] += 1
        if answer.HasField("pull"):
            values = Values(answer.pull.version, answer.pull.generation, {})
            generation = worker.standing.membership.generation
            worker.cluster.invariants.check_values(worker, values, generation)
            if tensors.into is not None:
                array = tensors.into.mine[ARENA]
                worker.source.received(self._shard, array, values.version)
        return answer


class _Exchanger:
    """In place of :class:`pserver.client.exchanger.Exchanger`."""

    attached = False
    transport = None

    def __init__(
        self, worker: Worker, address: str, shard: int, sent: Callable[[], object]
    ) -> None:
        self._worker = worker
        self._address = address
        self._shard = shard
        self._sent = sent
        self._given_up = ""
        self._under_way: dict[Call, None] = {}

    def close(self) -> None:
        """An exchange that is under way fails."""
        self.cancel()

    def cancel(self) -> None:
        """An exchange that is under way fails."""
        for call in list(self._under_way):
            call.give_up()

    def initialize(self, stream: Iterator[bytes], timeout: float) -> pb.InitializeResponse:
        header, pieces = read_stream(stream, pb.InitializeHeader)
        arena = np.frombuffer(b"".join(bytes(piece.data) for piece in pieces), np.float32)
        self._call("Initialize", (wire.from_initialize(header), Tensors(arena)), timeout)
        return pb.InitializeResponse()

    def get_status(self, request: pb.GetStatusRequest, timeout: float) -> pb.GetStatusResponse:
        status: pb.GetStatusResponse = self._call("GetStatus", request, timeout)
        return status

    def carry_out(self, header: pb.ExchangeHeader, tensors: Outgoing) -> pb.ExchangeAnswer:
        into, wanted = tensors.into, tensors.wanted
        if self._given_up:
            raise SegmentLost(self._given_up)
        try:
            if not header.HasField("push"):
                request = wire.from_pull(header.pull)
                self._count("rows pulled alone", request.rows_only)
                self._count("rows prefetched", request.rows_only and self._worker.source.computes)
                patient = request, header.patience_ms / 1000
                return self._received(self._call("Pull", patient), into, wanted)
            push = self._pushed(header, tensors)
            if not header.HasField("pull"):
                result = self._call("Push", push)
                self._count("sums refused", result.outcome == "one_by_one")
                return pb.ExchangeAnswer(push=wire.to_push_result(result))
            self._count("rows pulled with a push", wanted is not None)
            result, values = self._call("PushPull", push)
            self._count("sums refused", result.outcome == "one_by_one")
            answer = self._received(values, into, wanted)
            answer.push.CopyFrom(wire.to_push_result(result))
            return answer
        except (Unreachable, DeadlinePassed) as error:
            if not self._worker.cluster.options.shared_memory:
                raise
            # The shard may still write there.
            self._given_up = str(error)
            raise SegmentLost(self._given_up) from None

    def _call(self, method: str, request: Any, deadline_s: float = EXCHANGE_S) -> Any:
        network = self._worker.cluster.network
        call = network.call(self._address, method, request, deadline_s, self._under_way)
        self._sent()
        return self._worker.fibers.wait(call)

    def _pushed(self, header: pb.ExchangeHeader, tensors: Outgoing) -> tuple[PushRequest, Tensors]:
        gradient, rows = tensors.gradient, tensors.rows
        request = wire.from_push(header.push)
        self._count("sums pushed", bool(request.summed))
        self._worker.source.check_base(self._shard, request)
        return request, Tensors(
            None if gradient is None else gradient[ARENA].parts[0],
            tuple(rows[table].values for table, _ in request.rows),
            from_table_ids(header.pull.rows),
            header.pull.round if header.pull.WhichOneof("source") == "round" else None,
            from_clock(header.pull.clock) if header.pull.HasField("clock") else None,
            header.patience_ms / 1000,
        )

    def _received(
        self, values: Values, into: Target | None, wanted: RowsWanted | None
    ) -> pb.ExchangeAnswer:
        """Puts what came where it belongs."""
        worker, shard = self._worker, self._shard
        generation = worker.standing.membership.generation
        worker.cluster.invariants.check_values(worker, values, generation)
        if into is not None:
            np.copyto(into.mine[ARENA], values.arrays[ARENA])
            worker.source.received(shard, into.mine[ARENA], values.version)
        if wanted is not None:
            for (table, _), came in zip(wanted.pairs, values.rows, strict=True):
                np.copyto(wanted.into[table], came)
                worker.source.received(shard, wanted.into[table], values.version)
        header = pb.PullHeader(version=values.version, generation=values.generation)
        return pb.ExchangeAnswer(pull=header)

    def _count(self, what: str, happened: bool) -> None:
        """Once for all shards, but for what a shard alone does."""
        if happened and (self._shard == 0 or what == "sums refused"):
            self._worker.cluster.counts[what] += 1
