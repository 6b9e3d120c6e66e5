"""The client with which a worker calls one shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import grpc

from pserver.client.exchanger import Exchanger
from pserver.client.requests import (
    Arrays,
    GradientPush,
    PullInfo,
    Requests,
    Source,
    fit_one_message,
)
from pserver.client.tries import Tries
from pserver.core.assembly import shard_extents
from pserver.core.requests import Outcome, PushResult, StagedEverywhere
from pserver.core.table_ids import RowsWanted
from pserver.transport.transport import TransportChoice, WorkerTransport
from pserver.transport.workspace import Workspace
from pserver.wire import messages as wire
from pserver.wire import streams
from psrpc.core.encoding import plain
from psrpc.core.plan import Plan
from psrpc.net.channel import open_channel
from psrpc.ops.retry import RetryPolicy
from psrpc.ops.threads import THREADS, Threads
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import encode_stream
from psrpc.wire.status import error_from_rpc

__all__ = [
    "Arrays",
    "GradientPush",
    "Outcome",
    "PullInfo",
    "PushResult",
    "RetryPolicy",
    "ShardClient",
    "Source",
    "StagedEverywhere",
]

DEADLINE_S = 60.0
"""Deadline of one try of a call that carries tensors."""

STATUS_S = 5.0


class ShardClient:
    """One worker's connection to one shard. One thread calls it; any thread may ``close`` it.

    The clients of all shards receive parameters into the same arrays, the worker's whole arenas;
    each fills its shard's part. Every call has a deadline and is idempotent. While the shard does
    not answer or is not ready, the client repeats the call, within the budget of ``retry``. Errors
    have the classes that the shard raised. When the budget is used up, a push that may have arrived
    raises ``OutcomeUnknown``; other calls ``NotReady`` if that was the last answer, else
    ``ShardUnreachable``. After an error the shard's part of ``into`` is undefined.

    With a ``workspace`` in shared memory and a shard that can attach it, tensors stay there. If the
    shard then fails to answer one exchange, that exchange and all later ones raise ``SegmentLost``,
    since the shard may still use the segment. The caller then has to discard workspace and client.
    """

    def __init__(
        self,
        address: str,
        incarnation: int,
        plan: Plan,
        shard: int,
        *,
        security: Security = PLAINTEXT,
        workspace: Workspace | None = None,
        retry: RetryPolicy | None = None,
        deadline_s: float = DEADLINE_S,
        stop: threading.Event | None = None,
        announce: Callable[[str], object] = lambda _reason: None,
        failed: Callable[[], object] = lambda: None,
        sent: Callable[[], object] = lambda: None,
        threads: Threads = THREADS,
        local: WorkerTransport | None = None,
    ) -> None:
        """Args:
        address: HOST:PORT; the client connects at the first call.
        incarnation: the shard's, from the coordinator.
        security: the certificates of this process.
        workspace: if it is shared memory, gradients and received parameters are exchanged there.
        deadline_s: deadline of one try of an exchange; a try may last up to twice as long.
        stop: when another thread sets it, calls are no longer repeated.
        announce: gets the reason why a call is repeated.
        failed: called before ``announce`` when a try got no answer, unless ``cancel`` ended it.
        sent: called at each try when the request of an exchange is sent, or handed to gRPC, and
            the client begins to wait.
        local: carries exchanges if this process hosts the shard itself.
        """
        self.peer = f"shard {shard} at {address}"
        self.security = security
        self._incarnation = incarnation
        self._plan = plan
        self._shard = shard
        self._deadline_s = deadline_s
        self._patience_ms = int(deadline_s * 900)
        self._tries = Tries(
            self.peer, retry or RetryPolicy(), stop or threads.event(), announce, failed, threads
        )
        self._requests = Requests(plan, shard)
        self.local = local
        self._open(address, workspace, sent)

    def _open(self, address: str, workspace: Workspace | None, sent: Callable[[], object]) -> None:
        """Opens the channel and creates the exchanger and the stubs."""
        self._channel = open_channel(address, self.security, Role.SHARD)
        self._exchanger = Exchanger(
            self._channel,
            address,
            self.security.encrypted,
            self.peer,
            self._plan,
            self._shard,
            workspace,
            self._deadline_s,
            sent,
            self.local,
        )
        path = f"/{wire.SERVICE}/"
        channel: Any = self._channel  # its type requires serializers; bytes need none
        made = pb.InitializeResponse.FromString
        self._initialize = channel.stream_unary(path + "Initialize", response_deserializer=made)
        asked, told = pb.GetStatusRequest.SerializeToString, pb.GetStatusResponse.FromString
        self._get_status = channel.unary_unary(path + "GetStatus", asked, told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def shares_memory(self) -> bool:
        """Whether the tensors of the last exchange stayed in shared memory."""
        return self._exchanger.attached

    @property
    def transport(self) -> TransportChoice | None:
        """How tensors travel; None before the first exchange. Thread-safe."""
        return self._exchanger.transport

    def cancel(self) -> None:
        """Ends the current exchange as a broken connection would, but does not call ``failed``."""
        with self._tries.cancelling():
            self._exchanger.cancel()

    def close(self) -> None:
        """Closes the connection; calls in flight fail."""
        self._exchanger.close()
        self._channel.close()

    def fence(self, generation: int, policy: int, session: bytes) -> types.Fence:
        """Returns the fence that every call except ``get_status`` needs; make it once per cluster.
        ``session`` is the worker's session."""
        fence = types.Fence(generation=generation, policy=policy, session=session)
        fence.plan_hash, fence.shard_incarnation = self._plan.hash, self._incarnation
        return fence

    def initialize(self, fence: types.Fence, values: Arrays, grant: bytes) -> bool:
        """Sets all parameters and state, with the ``grant`` of the lease. False if the shard was
        initialized already. Raises CheckpointError if it cannot read the first rows of tables."""
        extents = shard_extents(self._plan, self._shard)
        header = pb.InitializeHeader(fence=fence, extents=streams.to_extents(extents), grant=grant)
        mine = {name: plain(part) for name, part in self._requests.mine(values).items()}
        parts = streams.gradient_parts(self._plan, mine)

        def call() -> bool:
            try:
                response: pb.InitializeResponse = self._initialize(
                    encode_stream(header, parts), timeout=self._deadline_s
                )
            except grpc.RpcError as error:
                raise error_from_rpc(error, self.peer) from None
            return not response.already

        return self._tries.repeat(call)

    def pull(
        self,
        fence: types.Fence,
        source: Source,
        into: Arrays,
        decision: types.SignedDecision | None = None,
        rows: RowsWanted | None = None,
        patience_s: float | None = None,
        staged: Sequence[StagedEverywhere] = (),
        clock: types.WorkerClock | None = None,
    ) -> PullInfo:
        """Reads the shard's part of every arena into ``into``.

        Args:
            decision: of the round before the pulled one, from the lease; the shard applies it
                first.
            rows: the table rows to read. With ``rows_only``, ``into`` stays as it is.
            staged: attempts that all shards hold, for rounds that were decided ahead.
            clock: from the lease (ssp); the shard waits for workers that are behind.
            patience_s: try once, and let the shard wait for the round no longer.

        Raises:
            RoundPassed: the shard is past the requested round.
            StaleGeneration: get the cluster again.
            NotReady: the round has not come within ``patience_s``.
        """
        header = pb.ExchangeHeader()
        self._requests.fill_pull(header.pull, fence, source, decision)
        self._requests.fill_staged(header.pull, staged)
        self._requests.fill_clock(header.pull, clock)
        answer = self._exchange(header, into, wanted=rows, patience_s=patience_s)
        return PullInfo(answer.pull.version, answer.pull.generation)

    def push(self, fence: types.Fence, push: GradientPush) -> PushResult:
        """Async: applies a gradient. Sync: stages it until its round is decided.

        Raises:
            RoundPassed: the round of the gradient is decided already.
            StaleGeneration: get the cluster again.
            OutcomeUnknown: the shard did not answer.
            ResourceExhausted: two attempts of the micro-batch are staged already.
        """
        header = pb.ExchangeHeader()
        self._requests.fill_push(header.push, fence, push)
        return wire.from_push_result(self._exchange(header, None, push).push)

    def confirm(self, fence: types.Fence, staged: Sequence[StagedEverywhere]) -> None:
        """Tells the shard of attempts that all shards hold."""
        header = pb.ExchangeHeader()
        header.pull.rows_only, header.pull.encoding = True, types.ENCODING_PLAIN
        self._requests.fill_pull(header.pull, fence, None, None)
        self._requests.fill_staged(header.pull, staged)
        self._exchange(header, None)

    def push_pull(
        self,
        fence: types.Fence,
        push: GradientPush,
        into: Arrays,
        rows: RowsWanted | None = None,
        round_number: int | None = None,
        clock: types.WorkerClock | None = None,
    ) -> tuple[PushResult, PullInfo]:
        """Does :meth:`push` and :meth:`pull` (newest or a round), in one exchange if the ids fit
        one message. With ``clock`` (ssp) the values may be too old (``behind``): pull again."""
        if not fit_one_message(push, rows):
            result = self.push(fence, push)
            result = replace(result, behind=clock is not None)
            # No round comes for a sum that is refused.
            round_number = None if result.outcome == "one_by_one" else round_number
            return result, self.pull(fence, round_number, into, rows=rows)
        header = pb.ExchangeHeader()
        self._requests.fill_source(header.pull, round_number)
        self._requests.fill_clock(header.pull, clock)
        self._requests.fill_push(header.push, fence, push)
        answer = self._exchange(header, into, push, rows)
        info = PullInfo(answer.pull.version, answer.pull.generation)
        return wire.from_push_result(answer.push), info

    def reach(self) -> None:
        """Waits until the shard answers."""
        self._tries.repeat(self.get_status)

    def get_status(self) -> pb.GetStatusResponse:
        """Returns the shard's figures; tries once."""
        try:
            status: pb.GetStatusResponse = self._get_status(pb.GetStatusRequest(), timeout=STATUS_S)
            return status
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.peer) from None

    def _exchange(
        self,
        header: pb.ExchangeHeader,
        into: Arrays | None,
        push: GradientPush | None = None,
        wanted: RowsWanted | None = None,
        patience_s: float | None = None,
    ) -> pb.ExchangeAnswer:
        header.patience_ms = self._patience_ms if patience_s is None else int(patience_s * 1000)
        tensors = self._requests.outgoing(header, into, push, wanted)

        def carry_out() -> pb.ExchangeAnswer:
            return self._exchanger.carry_out(header, tensors)

        if patience_s is not None:
            return self._tries.once(carry_out)
        return self._tries.repeat(carry_out, None if push is None else push.batch)
