"""Connects the network's thread with the event loop that the job runs on.

The job loop may be busy for a while, with a transaction on a slow disk or with the files of a
failed checkpoint. The network thread answers health checks meanwhile, and answers heartbeats from
the last reply, which rarely differs a second later. Those heartbeats still reach the job, in order,
and before its clock looks for silent members.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

from coordinator.membership.membership import MAX_ACTIVE
from psrpc.core.errors import PsError
from psrpc.net.health import AioHealthServicer
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1.coordinator_pb2_grpc import CoordinatorServicer

BUSY_S = 0.5
"""How long a heartbeat waits for the job loop before getting the cached reply. Callers wait for
3 s."""

STANDSTILL_S = 60.0
"""After this time the job loop counts as dead, and its health check and cached replies end."""

BEAT_S = 1.0

REMEMBERED = 2 * MAX_ACTIVE
"""Number of cached replies: enough for all members that a job can have."""

UNDELIVERED = 64 * 1024
"""Maximum of answered heartbeats that have not reached the job; further ones wait for it."""

_MEMBERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "HeartbeatShard": lambda request: ("shard", request.shard, request.incarnation),
    "HeartbeatWorker": lambda request: ("worker", request.session),
}
"""Heartbeat methods, each with the key of its sender."""

Result = TypeVar("Result")


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs ``work`` on the thread and returns its result. Blocks, so only for quick work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs ``work`` on the thread and awaits its result in the caller's loop."""
        return cast("Result", await call_on(self._loop, lambda: work))

    def stop(self) -> None:
        """Stops the thread; may be called twice, and without a start."""
        if self._loop.is_closed():
            return
        if self._thread.ident is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()


async def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function`` in another thread's loop. An awaitable result is awaited there, and
    cancelled if the caller is cancelled. A result that needs no wait costs one turn of each loop:
    all commits take this way, and every round of sync training waits for them."""
    call = _Call(function, args)
    loop.call_soon_threadsafe(call.begin)
    try:
        return await call.answer
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):  # the other loop is closed
            loop.call_soon_threadsafe(call.cancel)
        raise


class _Call:
    """One call into another thread's loop. Made and awaited in the caller's loop; the other loop
    runs the methods."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        self._home = asyncio.get_running_loop()
        self._task: asyncio.Future[Any] | None = None
        self._cancelled = False
        self.answer: asyncio.Future[Any] = self._home.create_future()

    def begin(self) -> None:
        if self._cancelled:
            return
        try:
            result = self._function(*self._args)
        except Exception as error:
            self._reply(None, error)
            return
        if inspect.isawaitable(result):
            self._task = asyncio.ensure_future(result)
            self._task.add_done_callback(self._ended)
        else:
            self._reply(result, None)

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            self._home_soon(self.answer.cancel)
        elif (error := task.exception()) is not None:
            self._reply(None, error)
        else:
            self._reply(task.result(), None)

    def _reply(self, result: Any, error: BaseException | None) -> None:
        self._home_soon(self._answered, result, error)

    def _home_soon(self, callback: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._home.call_soon_threadsafe(callback, *args)

    def _answered(self, result: Any, error: BaseException | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)


class Pulse:
    """The last time the job loop made progress. Thread-safe: one thread beats, all may look."""

    def __init__(self) -> None:
        self._beat = math.inf

    @property
    def stands_still(self) -> bool:
        """Whether the loop has not beaten for :data:`STANDSTILL_S` since its first beat."""
        return time.monotonic() - self._beat > STANDSTILL_S

    async def beat(self) -> None:
        """Beats forever in the job loop."""
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT_S)


class BridgedHealthServicer(AioHealthServicer):
    """Reports the health of the job loop without needing that loop."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  # an RPC's name
        """Answers as the standard servicer does, or NOT_SERVING if the job loop is dead."""
        answer = await super().Check(request, context)
        if self._pulse.stands_still:
            answer.status = answer.NOT_SERVING
        return answer


class CallOrigin:
    """The part of a call's context that the job loop may read: the identity of the caller. gRPC
    frees the context when the call ends, by its deadline or by a cached reply, perhaps before the
    job reads it; reading it afterwards crashes the process."""

    def __init__(self, context: Any) -> None:
        self._auth_context: Mapping[str, Sequence[bytes]] = context.auth_context()
        self._peer: str = context.peer()

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Returns the same as gRPC's method."""
        return self._auth_context

    def peer(self) -> str:
        """Returns the same as gRPC's method."""
        return self._peer


class Crossing(CoordinatorServicer):
    """The Coordinator service on the network's loop; forwards each call to a servicer in the job
    loop, whose methods return the response or an awaitable of it."""

    def __init__(
        self,
        job: asyncio.AbstractEventLoop,
        pulse: Pulse,
        closed: Callable[[str], PsError],
    ) -> None:
        """``closed`` makes the error of a method that is called before there is a servicer."""
        self._job = job
        self._pulse = pulse
        self._closed = closed
        self._servicer: CoordinatorServicer | None = None
        self._last: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._undelivered: set[asyncio.Task[Any]] = set()
        for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods:
            make = self._streamed if method.server_streaming else self._called
            across = make(method.name)
            member = _MEMBERS.get(method.name)
            setattr(self, method.name, across if member is None else self._known(across, member))

    def open(self, servicer: CoordinatorServicer) -> None:
        """Forwards calls to ``servicer`` from now on. Thread-safe."""
        self._servicer = servicer

    def _inner(self, method: str) -> Callable[..., Any]:
        if self._servicer is None:
            raise self._closed(method)
        bound: Callable[..., Any] = getattr(self._servicer, method)
        return bound

    def _called(self, method: str) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            return await call_on(self._job, self._inner(method), request, CallOrigin(context))

        return call

    def _streamed(self, method: str) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            answers = self._inner(method)(request, CallOrigin(context))
            try:
                while (answer := await call_on(self._job, _next, answers)) is not None:
                    yield answer
            finally:
                # Not awaited: the caller has gone.
                asyncio.run_coroutine_threadsafe(_close(answers), self._job)

        return call

    def _known(
        self, across: Callable[..., Any], member: Callable[[Any], tuple[Any, ...]]
    ) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            key = member(request)
            answering = asyncio.ensure_future(across(request, context))
            try:
                await asyncio.wait((answering,), timeout=BUSY_S)
                last = None if answering.done() or self._pulse.stands_still else self._last.get(key)
                if last is None or len(self._undelivered) >= UNDELIVERED:
                    answer = await answering
                    self._remember(key, answer)
                    return answer
            except asyncio.CancelledError:
                answering.cancel()
                raise
            self._undelivered.add(answering)
            answering.add_done_callback(self._delivered)
            return last

        return call

    def _remember(self, key: tuple[Any, ...], answer: Any) -> None:
        self._last.pop(key, None)
        # A member that the job does not know must learn this from the job itself.
        if not answer.unknown:
            self._last[key] = answer
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)

    def _delivered(self, answering: asyncio.Task[Any]) -> None:
        self._undelivered.discard(answering)
        if not answering.cancelled():
            # Marks the error as retrieved; the member's next heartbeat fails with it, too.
            answering.exception()


async def _next(answers: AsyncGenerator[Any, None]) -> Any:
    return await anext(answers, None)


async def _close(answers: Any) -> None:
    # A reader cancelled a moment ago may still be leaving the generator.
    while answers.ag_running:
        await asyncio.sleep(0)
    await answers.aclose()
