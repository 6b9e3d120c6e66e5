"""How a worker calls one shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from pserver import wire
from pserver.assembly import Assembly, check_extents, shard_extents
from pserver.requests import PushResult
from pserver.retry import RetryPolicy, persist
from psrpc.batch import BatchId
from psrpc.channel import open_channel
from psrpc.codec import MAX_CHUNK_BYTES, encode_stream
from psrpc.errors import InvalidArgument
from psrpc.plan import Plan
from psrpc.status import error_from_rpc
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types

__all__ = ["PullInfo", "Push", "PushResult", "RetryPolicy", "ShardClient", "Source"]

NDArray = npt.NDArray[Any]
Arrays = Mapping[str, NDArray]
"""Arena name -> the worker's flat array ``[arena length]`` of it, whole, contiguous."""

Source = int | str | None
"""What to pull: None is the newest values, a number that round's, a string a kept snapshot's."""

DEADLINE_S = 60.0
"""Of one try of a call that carries tensors."""

STATUS_S = 5.0

_SINGLE = (wire.SINGLE,)

Header = TypeVar("Header", bound=Message)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PullInfo:
    """What was pulled: the version and generation that the values have."""

    version: int
    generation: int


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient to push. ``gradients`` is None when it was not finite: recorded as skipped."""

    worker: str
    batch: BatchId
    attempt: int
    base_version: int
    gradients: Arrays | None


class ShardClient:
    """One worker's connection to one shard. Thread-safe.

    Arrays are the worker's whole arenas; this client reads and writes its shard's part of them, so
    the clients of all shards work side by side on the same arrays. Every call has a deadline, is
    safe to repeat and is repeated, within the budget of ``retry``, while the shard does not answer
    or waits for something. Errors are the classes that the shard raised; when the budget is used
    up, ``ShardUnreachable`` or, if the shard answered that it waits, ``NotReady``. After an error
    the shard's part of ``into`` may hold anything.
    """

    def __init__(
        self,
        address: str,
        incarnation: int,
        plan: Plan,
        shard: int,
        *,
        retry: RetryPolicy | None = None,
        stop: threading.Event | None = None,
        announce: Callable[[str], object] = lambda _reason: None,
    ) -> None:
        """Args:
        address: HOST:PORT; nothing is connected before the first call.
        incarnation: the shard's, as the coordinator told it.
        stop: set from elsewhere, it ends the repetition of calls.
        announce: hears why a call has to be repeated.
        """
        self.peer = f"shard {shard} at {address}"
        self._incarnation = incarnation
        self._plan = plan
        self._shard = shard
        self._retry = retry or RetryPolicy()
        self._stop = stop or threading.Event()
        self.announce = announce
        self._extents = shard_extents(plan, shard)
        self._extent_messages = wire.to_extents(self._extents)
        # See pserver.handlers: a quicker way to the same where one message holds everything.
        self._one_message = sum(-(-n // MAX_CHUNK_BYTES) for _, n in self._extents) <= 1
        self._channel = open_channel(address)
        path = f"/{wire.SERVICE}/"
        result, made = pb.PushGradientsResponse.FromString, pb.InitializeResponse.FromString
        channel: Any = self._channel  # the stubs want serializers; bytes need none
        self._initialize = channel.stream_unary(path + "Initialize", response_deserializer=made)
        self._pull = channel.unary_stream(path + "Pull", pb.PullRequest.SerializeToString)
        self._pull_one = channel.unary_unary(path + "Pull", pb.PullRequest.SerializeToString)
        self._push = channel.stream_unary(path + "PushGradients", response_deserializer=result)
        self._push_one = channel.unary_unary(path + "PushGradients", response_deserializer=result)
        self._push_pull = channel.stream_stream(path + "PushPull")
        self._push_pull_one = channel.unary_unary(path + "PushPull")
        self._get_status = channel.unary_unary(
            path + "GetStatus",
            pb.GetStatusRequest.SerializeToString,
            pb.GetStatusResponse.FromString,
        )

    def __enter__(self) -> ShardClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls in flight fail."""
        self._channel.close()

    def fence(self, generation: int, policy: int) -> types.Fence:
        """What every call but ``get_status`` begins with; make it once per cluster."""
        return types.Fence(
            generation=generation,
            policy=policy,
            plan_hash=self._plan.hash,
            shard_incarnation=self._incarnation,
        )

    def initialize(
        self, fence: types.Fence, values: Arrays, deadline_s: float = DEADLINE_S
    ) -> bool:
        """Sets all parameters and state; False when the shard had been initialized before."""
        header = pb.InitializeHeader(fence=fence, extents=self._extent_messages)

        def call() -> bool:
            messages = encode_stream(header, self._parts(values))
            response: pb.InitializeResponse = self._initialize(messages, timeout=deadline_s)
            return not response.already

        return self._persist(call)

    def pull(
        self,
        fence: types.Fence,
        worker: str,
        source: Source,
        into: Arrays,
        decision: types.Decision | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> PullInfo:
        """Reads the shard's part of every arena into ``into``.

        Args:
            decision: of the round before the one that is pulled; the shard applies it first.

        Raises:
            RoundPassed: the shard is past the round that was asked for.
            StaleGeneration: get the cluster again.
        """
        request = pb.PullRequest(fence=fence, worker=worker, decision=decision)
        if source is None:
            request.newest = True
        elif isinstance(source, int):
            request.round = source
        else:
            request.snapshot = source

        def call() -> PullInfo:
            answer = (
                iter((self._pull_one(request, timeout=deadline_s, metadata=_SINGLE),))
                if self._one_message
                else self._pull(request, timeout=deadline_s)
            )
            return self._receive(answer, pb.PullHeader, lambda header: header, into)[1]

        return self._persist(call)

    def push(self, fence: types.Fence, push: Push, deadline_s: float = DEADLINE_S) -> PushResult:
        """Async: applies a gradient. Sync: stages it until its round is decided.

        Raises:
            RoundPassed: the round it was computed for has been decided.
            StaleGeneration: get the cluster again.
            ResourceExhausted: two attempts of the micro-batch are staged already.
        """

        def call() -> PushResult:
            messages = self._push_messages(fence, push)
            response: pb.PushGradientsResponse = (
                self._push_one(next(messages), timeout=deadline_s, metadata=_SINGLE)
                if self._one_message or push.gradients is None
                else self._push(messages, timeout=deadline_s)
            )
            return wire.from_push_result(response.result)

        return self._persist(call)

    def push_pull(
        self, fence: types.Fence, push: Push, into: Arrays, deadline_s: float = DEADLINE_S
    ) -> tuple[PushResult, PullInfo]:
        """Async: :meth:`push` and :meth:`pull` of the newest values in one call."""

        def call() -> tuple[PushResult, PullInfo]:
            messages = self._push_messages(fence, push)
            answer = (
                iter((self._push_pull_one(next(messages), timeout=deadline_s, metadata=_SINGLE),))
                if self._one_message
                else self._push_pull(messages, timeout=deadline_s)
            )
            header, info = self._receive(answer, pb.PushPullHeader, lambda both: both.pull, into)
            return wire.from_push_result(header.push), info

        return self._persist(call)

    def get_status(self) -> pb.GetStatusResponse:
        """The shard's figures; one try."""
        try:
            status: pb.GetStatusResponse = self._get_status(pb.GetStatusRequest(), timeout=STATUS_S)
            return status
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.peer) from None

    def _persist(self, call: Callable[[], Result]) -> Result:
        def typed() -> Result:
            try:
                return call()
            except grpc.RpcError as error:
                raise error_from_rpc(error, self.peer) from None

        return persist(typed, self.peer, self._retry, stop=self._stop, announce=self.announce)

    def _push_messages(self, fence: types.Fence, push: Push) -> Iterator[bytes]:
        skipped = push.gradients is None
        header = pb.PushHeader(
            fence=fence,
            worker=push.worker,
            batch=wire.to_batch(push.batch),
            attempt=push.attempt,
            base_version=push.base_version,
            examples=push.batch.count,
            skipped=skipped,
            extents=() if skipped else self._extent_messages,
        )
        return encode_stream(header, [] if push.gradients is None else self._parts(push.gradients))

    def _receive(
        self,
        messages: Iterator[bytes],
        header: type[Header],
        pull_header: Callable[[Header], pb.PullHeader],
        into: Arrays,
    ) -> tuple[Header, PullInfo]:
        """Takes an answer that carries all arenas, straight to their place in ``into``."""
        try:
            found, pieces = wire.read_stream(messages, header)
            pulled = pull_header(found)
            extents = wire.from_extents(pulled.extents)
            check_extents(self._plan, self._shard, extents)
            Assembly(self._plan, extents, self._mine(into)).accept_all(pieces)
        except InvalidArgument as error:
            if isinstance(messages, grpc.Call):
                messages.cancel()  # type: ignore[no-untyped-call]  # grpc's
            raise InvalidArgument(f"{self.peer} answered what cannot be used: {error}") from None
        return found, PullInfo(pulled.version, pulled.generation)

    def _parts(self, arrays: Arrays) -> list[tuple[int, memoryview]]:
        mine = self._mine(arrays)
        return [
            (index, mine[self._plan.arenas[index].name].view(np.uint8).data)
            for index, nbytes in self._extents
            if nbytes
        ]

    def _mine(self, arrays: Arrays) -> dict[str, NDArray]:
        """The shard's part of every arena, as views.

        Raises:
            InvalidArgument: an array is not a whole arena of the plan.
        """
        mine = {}
        for arena in self._plan.arenas:
            array = arrays[arena.name]
            if array.shape != (arena.length,) or array.dtype != arena.dtype:
                raise InvalidArgument(
                    f"the array for arena {arena.name} is {array.dtype}{list(array.shape)};"
                    f" expected {arena.dtype}[{arena.length}]"
                )
            mine[arena.name] = array[arena.cuts[self._shard] : arena.cuts[self._shard + 1]]
        return mine
