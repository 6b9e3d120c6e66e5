"""How a worker calls one shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import numpy.typing as npt

from pserver.client.exchanger import Exchanger, Target, Transport
from pserver.core.assembly import GRADIENTS, VALUES, Extent, check_extents, shard_extents
from pserver.core.requests import Outcome, PushResult
from pserver.core.table_ids import RowsWanted, add_table_ids, count, pushed_pairs, row_extents
from pserver.transport.workspace import Workspace
from pserver.wire import messages as wire
from pserver.wire import streams
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding, Gradient, plain
from psrpc.core.errors import (
    DeadlinePassed,
    InvalidArgument,
    NotReady,
    OutcomeUnknown,
    PsError,
    ShardUnreachable,
    Unreachable,
)
from psrpc.core.plan import Plan
from psrpc.core.tables import MAX_IDS, Rows
from psrpc.net.channel import open_channel
from psrpc.ops.retry import GaveUp, RetryPolicy, persist
from psrpc.ops.threads import THREADS, Threads
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import encode_stream
from psrpc.wire.status import error_from_rpc

__all__ = ["Outcome", "PullInfo", "Push", "PushResult", "RetryPolicy", "ShardClient", "Source"]

NDArray = npt.NDArray[Any]
Arrays = Mapping[str, NDArray]
"""Arena name -> the worker's flat array ``[arena length]`` of it, whole, contiguous. Where values
are received, its dtype is what they travel in: the arena's own, bfloat16 or float16. A mapping
that was passed once holds the same arrays for good."""

Source = int | str | None
"""What to pull: None is the newest values, a number that round's, a string a kept snapshot's."""

DEADLINE_S = 60.0
"""Of one try of a call that carries tensors."""

STATUS_S = 5.0

_TARGETS = 4
"""Mappings that a client remembers: two parameter sets, and some to spare."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PullInfo:
    """What was pulled: the version and generation that the values have."""

    version: int
    generation: int


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient to push: the shard's part of every arena, and of tables.

    ``gradients`` is None when it was not finite: recorded as skipped. ``rows`` has the gradients of
    rows by table, all of the shard, duplicates summed: ids that ascend. ``totals`` are what the
    batch adds to those of its epoch, see :mod:`psrpc.core.batch`; none of a gradient that was not.
    ``grant`` came with the lease of the attempt.
    """

    batch: BatchId
    attempt: int
    base_version: int
    gradients: Gradient | None
    rows: Mapping[int, Rows] | None = None
    totals: Sequence[float] = ()
    grant: bytes = b""


class ShardClient:
    """One worker's connection to one shard. One thread calls it; ``close`` may come from another.

    Parameters are received into the shard's part of the worker's whole arenas, so the clients of
    all shards work side by side on the same arrays. Every call has a deadline, is safe to repeat
    and is repeated, within the budget of ``retry``, while the shard does not answer or waits for
    something. Errors are the classes that the shard raised; when the budget is used up,
    ``OutcomeUnknown`` of a push that may have arrived, otherwise ``NotReady`` if the shard answered
    that it waits, or ``ShardUnreachable``. After an error the shard's part of ``into`` may hold
    anything.

    With a ``workspace`` that is shared memory, and a shard that can attach it, tensors stay there.
    An exchange that is not answered then raises ``SegmentLost``: the shard may still be at it. So
    does every exchange after it: the workspace has to be given up, and the client with it.
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
    ) -> None:
        """Args:
        address: HOST:PORT; nothing is connected before the first call.
        incarnation: the shard's, as the coordinator told it.
        security: this process's.
        workspace: where gradients are put and parameters received, if it is shared memory.
        deadline_s: of one try of an exchange; it may last up to twice as long.
        stop: set from elsewhere, it ends the repetition of calls.
        announce: hears why a call has to be repeated.
        failed: called whenever a try got no answer, before ``announce``; not where ``cancel``
            has ended it.
        sent: called when the request of an exchange has left, or gRPC has it; what follows is a
            wait. Again where the call is repeated.
        """
        self.peer = f"shard {shard} at {address}"
        self._incarnation = incarnation
        self._plan = plan
        self._shard = shard
        self._retry = retry or RetryPolicy()
        self._deadline_s = deadline_s
        self._patience_ms = int(deadline_s * 900)
        self._threads = threads
        self._stop = stop or threads.event()
        self.announce = announce
        self._failed = failed
        self._counting = threading.Lock()
        self._cancels_begun = self._cancels_over = 0
        self._targets: dict[int, tuple[Arrays, Target]] = {}
        self._extents: list[Extent] = []
        self._extent_messages: list[types.Extent] = []
        self._open(address, security, workspace, sent)

    def _open(
        self,
        address: str,
        security: Security,
        workspace: Workspace | None,
        sent: Callable[[], object],
    ) -> None:
        """Makes ready what calls go through."""
        self._channel = open_channel(address, security, Role.SHARD)
        self._exchanger = Exchanger(
            self._channel,
            address,
            security,
            self.peer,
            self._plan,
            self._shard,
            workspace,
            self._deadline_s,
            sent,
        )
        path = f"/{wire.SERVICE}/"
        made = pb.InitializeResponse.FromString
        channel: Any = self._channel  # the stubs want serializers; bytes need none
        self._initialize = channel.stream_unary(path + "Initialize", response_deserializer=made)
        self._get_status = channel.unary_unary(
            path + "GetStatus",
            pb.GetStatusRequest.SerializeToString,
            pb.GetStatusResponse.FromString,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def shares_memory(self) -> bool:
        """Whether the tensors of the last exchange could stay in shared memory."""
        return self._exchanger.attached

    @property
    def transport(self) -> Transport | None:
        """How tensors travel; None before the first exchange. Any thread may ask."""
        return self._exchanger.transport

    def cancel(self) -> None:
        """Ends the exchange that is under way, if there is one, as if its connection had broken;
        ``failed`` is not called for it."""
        with self._counting:
            self._cancels_begun += 1
        try:
            self._exchanger.cancel()
        finally:
            with self._counting:
                self._cancels_over += 1

    def close(self) -> None:
        """Closes the connection; calls in flight fail."""
        self._exchanger.close()
        self._channel.close()

    def fence(self, generation: int, policy: int, session: bytes) -> types.Fence:
        """What every call but ``get_status`` begins with; make it once per cluster. ``session`` is
        the worker's."""
        return types.Fence(
            generation=generation,
            policy=policy,
            plan_hash=self._plan.hash,
            shard_incarnation=self._incarnation,
            session=session,
        )

    def initialize(self, fence: types.Fence, values: Arrays, grant: bytes) -> bool:
        """Sets all parameters and state; False when the shard had been initialized before.

        Args:
            grant: came with the lease.

        Raises:
            CheckpointError: the shard cannot read the rows that its tables begin with.
        """
        extents = shard_extents(self._plan, self._shard)
        header = pb.InitializeHeader(fence=fence, extents=streams.to_extents(extents), grant=grant)
        mine = {name: plain(part) for name, part in self._mine(values).items()}
        parts = streams.gradient_parts(self._plan, mine)

        def call() -> bool:
            try:
                response: pb.InitializeResponse = self._initialize(
                    encode_stream(header, parts), timeout=self._deadline_s
                )
            except grpc.RpcError as error:
                raise error_from_rpc(error, self.peer) from None
            return not response.already

        return self._persist(call)

    def pull(
        self,
        fence: types.Fence,
        source: Source,
        into: Arrays,
        decision: types.SignedDecision | None = None,
        rows: RowsWanted | None = None,
    ) -> PullInfo:
        """Reads the shard's part of every arena into ``into``.

        Args:
            decision: of the round before the one that is pulled, as the lease has it; the shard
                applies it first.
            rows: what to read of tables. With ``rows_only`` nothing is put into ``into``.

        Raises:
            RoundPassed: the shard is past the round that was asked for.
            StaleGeneration: get the cluster again.
        """
        request = pb.PullRequest(fence=fence, decision=decision)
        if source is None:
            request.newest = True
        elif isinstance(source, int):
            request.round = source
        else:
            request.snapshot = source
        answer = self._exchange(pb.ExchangeHeader(pull=request), into, wanted=rows)
        return PullInfo(answer.pull.version, answer.pull.generation)

    def push(self, fence: types.Fence, push: Push) -> PushResult:
        """Async: applies a gradient. Sync: stages it until its round is decided.

        Raises:
            RoundPassed: the round it was computed for has been decided.
            StaleGeneration: get the cluster again.
            OutcomeUnknown: the shard did not answer.
            ResourceExhausted: two attempts of the micro-batch are staged already.
        """
        header = pb.ExchangeHeader()
        self._fill_push(header.push, fence, push)
        return wire.from_push_result(self._exchange(header, None, push).push)

    def push_pull(
        self, fence: types.Fence, push: Push, into: Arrays, rows: RowsWanted | None = None
    ) -> tuple[PushResult, PullInfo]:
        """Async: :meth:`push` and :meth:`pull` of the newest values in one exchange; in two, where
        one message cannot name the ids of both."""
        if (
            rows is not None
            and push.rows
            and (sum(len(r.ids) for r in push.rows.values()) + count(rows.pairs) > MAX_IDS)
        ):
            result = self.push(fence, push)
            return result, self.pull(fence, None, into, rows=rows)
        header = pb.ExchangeHeader()
        header.pull.newest = True
        self._fill_push(header.push, fence, push)
        answer = self._exchange(header, into, push, rows)
        info = PullInfo(answer.pull.version, answer.pull.generation)
        return wire.from_push_result(answer.push), info

    def reach(self) -> None:
        """Returns once the shard has answered something that costs it nothing."""
        self._persist(self.get_status)

    def get_status(self) -> pb.GetStatusResponse:
        """The shard's figures; one try."""
        try:
            status: pb.GetStatusResponse = self._get_status(pb.GetStatusRequest(), timeout=STATUS_S)
            return status
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.peer) from None

    def _persist(self, call: Callable[[], Result], batch: BatchId | None = None) -> Result:
        """``call`` with its repetitions; ``batch`` is what it pushes."""

        def give_up(tries: GaveUp) -> PsError:
            if batch is not None and tries.sent:
                return OutcomeUnknown(
                    f"{self.peer} has not answered the push of {batch}, so whether it has the batch"
                    f" is not known; pushing it again is safe ({tries})"
                )
            if isinstance(tries.last, NotReady):
                return tries.last
            return ShardUnreachable(f"{self.peer} did not answer {tries}")

        return persist(
            self._try(call),
            self._retry,
            give_up,
            stop=self._stop,
            announce=self.announce,
            now=self._threads.now,
            chance=self._threads.chance,
        )

    def _try(self, call: Callable[[], Result]) -> Callable[[], Result]:
        def tried() -> Result:
            # Of cancels that are over by now none can end this try.
            over = self._cancels_over
            try:
                return call()
            except (Unreachable, DeadlinePassed):
                if self._cancels_begun == over:
                    self._failed()
                raise

        return tried

    def _fill_push(self, header: pb.PushHeader, fence: types.Fence, push: Push) -> None:
        """Fills ``header``, where it stands."""
        header.fence.CopyFrom(fence)
        header.batch.CopyFrom(wire.to_batch(push.batch))
        header.attempt = push.attempt
        header.grant = push.grant
        header.base_version = push.base_version
        header.examples = push.batch.count
        header.skipped = push.gradients is None
        if push.gradients is None:
            return
        header.totals.extend(push.totals)
        header.extents.extend(self._extents_of(push.gradients))
        if push.rows:
            pushed = pushed_pairs(self._plan, push.rows)
            add_table_ids(header.rows, pushed)
            header.extents.extend(streams.to_extents(row_extents(self._plan, pushed)))

    def _extents_of(self, gradient: Gradient) -> list[types.Extent]:
        """What a gradient announces, checked; the same from step to step."""
        extents = streams.gradient_extents(self._plan, gradient)
        if extents != self._extents:
            check_extents(self._plan, self._shard, extents, GRADIENTS)
            self._extents, self._extent_messages = extents, streams.to_extents(extents)
        return self._extent_messages

    def _exchange(
        self,
        header: pb.ExchangeHeader,
        into: Arrays | None,
        push: Push | None = None,
        wanted: RowsWanted | None = None,
    ) -> pb.ExchangeAnswer:
        header.patience_ms = self._patience_ms
        target = None
        if wanted is not None:
            wanted.check(self._plan)
            add_table_ids(header.pull.rows, wanted.pairs)
            header.pull.rows_only = wanted.rows_only
            header.pull.encoding = types.ENCODING_PLAIN
        if into is not None and (wanted is None or not wanted.rows_only):
            target = self._target(into)
            header.pull.encoding = streams.to_encoding(target.encoding)
        gradient, batch = (push.gradients, push.batch) if push is not None else (None, None)
        rows = push.rows if push is not None else None
        return self._persist(
            lambda: self._exchanger.carry_out(header, gradient, target, rows, wanted), batch
        )

    def _target(self, into: Arrays) -> Target:
        """The shard's part of ``into``; worked out once, since a worker has two such mappings."""
        known = self._targets.get(id(into))
        if known is not None and known[0] is into:
            return known[1]
        mine = self._mine(into)
        target = Target(mine, self._encoding(mine))
        if len(self._targets) >= _TARGETS:
            self._targets.pop(next(iter(self._targets)))
        self._targets[id(into)] = (into, target)
        return target

    def _encoding(self, mine: dict[str, NDArray]) -> Encoding:
        """What the arenas that may be encoded are received in."""
        for arena in self._plan.arenas:
            if arena.encodable:
                name: Any = mine[arena.name].dtype.name
                return "plain" if name == arena.dtype else name
        return "plain"

    def _mine(self, arrays: Arrays) -> dict[str, NDArray]:
        """The shard's part of every arena, as views.

        Raises:
            InvalidArgument: an array is not a whole arena of the plan.
        """
        mine = {}
        for arena in self._plan.arenas:
            array = arrays[arena.name]
            names = (arena.dtype, *VALUES) if arena.encodable else (arena.dtype,)
            if array.shape != (arena.length,) or array.dtype.name not in names:
                raise InvalidArgument(
                    f"the array for arena {arena.name} is {array.dtype}{list(array.shape)};"
                    f" expected {arena.dtype}[{arena.length}]"
                )
            mine[arena.name] = array[arena.cuts[self._shard] : arena.cuts[self._shard + 1]]
        return mine
