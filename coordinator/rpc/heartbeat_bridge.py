"""Between the thread of the network and the event loop that the job runs on.

The job's loop may be busy for a while: with a transaction that a slow disk does not take, or with
the files of a checkpoint that failed. Health checks and signs of life are answered meanwhile; the
latter with what was answered the last time, which is seldom another thing a second later. They
still reach the job, in their order, and before its clock looks for who was silent.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

from coordinator.membership.membership import MAX_ACTIVE
from psrpc.core.errors import PsError
from psrpc.net.health import AioHealthServicer
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1.coordinator_pb2_grpc import CoordinatorServicer

BUSY_S = 0.5
"""Who gives a sign of life waits so long for the job's own answer. Callers wait for 3 s."""

STANDSTILL_S = 60.0
"""After so long the job's loop is not busy but dead: nobody is told any more that it lives."""

BEAT_S = 1.0

REMEMBERED = 2 * MAX_ACTIVE
"""Members whose last answer is known: all that there can be."""

UNDELIVERED = 64 * 1024
"""Signs of life that were answered and have not reached the job; further ones wait."""

_MEMBERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "HeartbeatShard": lambda request: ("shard", request.shard, request.incarnation),
    "HeartbeatWorker": lambda request: ("worker", request.session),
}
"""Signs of life, and whose they are."""

Result = TypeVar("Result")


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        """Runs what it is given from now on."""
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What comes of ``work`` there. Blocks, so only for what takes no time."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The same, awaited in another loop."""
        return await run_on(self._loop, work)

    def stop(self) -> None:
        """Runs nothing any more; may be called twice, and also if it was never started."""
        if self._loop.is_closed():
            return
        if self._thread.ident is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()


async def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """What comes of ``work``, done in another thread's loop; cancelled there if this is."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class Pulse:
    """When the job's loop has last done anything. Thread-safe: one thread beats, all may look."""

    def __init__(self) -> None:
        self._beat = math.inf

    @property
    def stands_still(self) -> bool:
        """Whether it has done nothing for :data:`STANDSTILL_S`, since it began to beat."""
        return time.monotonic() - self._beat > STANDSTILL_S

    async def beat(self) -> None:
        """For ever, in the job's loop."""
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT_S)


class HealthServicer(AioHealthServicer):
    """Tells of the job's loop, which it does not need for that."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  # an RPC's name
        """As the standard one, unless the job's loop is dead."""
        answer = await super().Check(request, context)
        if self._pulse.stands_still:
            answer.status = answer.NOT_SERVING
        return answer


class CallOrigin:
    """What the job's loop may know of a call: who makes it. gRPC frees a call's own context when
    the call ends, by its deadline or with an answer from here, and the job may not have seen it by
    then; whatever reads it afterwards brings the process down."""

    def __init__(self, context: Any) -> None:
        self._found: Mapping[str, Sequence[bytes]] = context.auth_context()
        self._peer: str = context.peer()

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """As gRPC's."""
        return self._found

    def peer(self) -> str:
        """As gRPC's."""
        return self._peer


class Crossing(CoordinatorServicer):
    """The Coordinator service as the network sees it: each call is made to a servicer in the job's
    loop. Used in the loop of the network."""

    def __init__(
        self,
        job: asyncio.AbstractEventLoop,
        pulse: Pulse,
        closed: Callable[[str], PsError],
    ) -> None:
        """``closed`` is what a call of this method gets before there is a servicer."""
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
        """There is a job: calls go to ``servicer`` from now on. Any thread may say so."""
        self._servicer = servicer

    def _inner(self, method: str) -> Callable[..., Any]:
        if self._servicer is None:
            raise self._closed(method)
        found: Callable[..., Any] = getattr(self._servicer, method)
        return found

    def _called(self, method: str) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            return await run_on(self._job, self._inner(method)(request, CallOrigin(context)))

        return call

    def _streamed(self, method: str) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            answers = self._inner(method)(request, CallOrigin(context))
            try:
                while (answer := await run_on(self._job, _next(answers))) is not None:
                    yield answer
            finally:
                # Not awaited: whoever is gone waits for nothing.
                asyncio.run_coroutine_threadsafe(_close(answers), self._job)

        return call

    def _known(
        self, across: Callable[..., Any], member: Callable[[Any], tuple[Any, ...]]
    ) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            who = member(request)
            answering = asyncio.ensure_future(across(request, context))
            try:
                await asyncio.wait((answering,), timeout=BUSY_S)
                last = None if answering.done() or self._pulse.stands_still else self._last.get(who)
                if last is None or len(self._undelivered) >= UNDELIVERED:
                    answer = await answering
                    self._remember(who, answer)
                    return answer
            except asyncio.CancelledError:
                answering.cancel()
                raise
            self._undelivered.add(answering)
            answering.add_done_callback(self._delivered)
            return last

        return call

    def _remember(self, who: tuple[Any, ...], answer: Any) -> None:
        self._last.pop(who, None)
        # One that the job does not know has to hear it from the job.
        if not answer.unknown:
            self._last[who] = answer
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)

    def _delivered(self, answering: asyncio.Task[Any]) -> None:
        self._undelivered.discard(answering)
        if not answering.cancelled():
            # Looked at, so that nobody complains; the next sign of life is refused for it, too.
            answering.exception()


async def _next(answers: AsyncGenerator[Any, None]) -> Any:
    return await anext(answers, None)


async def _close(answers: Any) -> None:
    # Its reader may have been cancelled a moment ago, and be on its way out.
    while answers.ag_running:
        await asyncio.sleep(0)
    await answers.aclose()
