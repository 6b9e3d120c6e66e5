"""Limits the calls that threaded and asyncio servers admit.

A server serves a bounded number of calls, in total and per address, and lets a bounded number wait.
Further calls get NotReady at once, and clients retry them. Vital calls
(:data:`psrpc.net.limits.VITAL`) have threads of their own (threaded servers), or do not count
(asyncio). A server reads a request only after it has admitted the call."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc

from psrpc.core.errors import NotReady
from psrpc.net.limits import (
    MAX_PARKED,
    MAX_WAITING,
    PEER_CALLS,
    VITAL,
    VITAL_THREADS,
    VITAL_UNREAD,
)
from psrpc.net.request import RequestReader, read_request
from psrpc.wire.interceptor import (
    AioInterceptor,
    Handler,
    Interceptor,
    behaviour_of,
    remake,
    run_on,
)


class CountingPool(ThreadPoolExecutor):
    """A thread pool that counts its calls. Thread-safe."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="rpc")
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def calls(self) -> int:
        """Number of running and waiting calls."""
        return self._calls

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See ThreadPoolExecutor."""
        with self._lock:
            self._calls += 1
        try:
            future = super().submit(fn, *args, **kwargs)
        except BaseException:
            self._ended()
            raise
        # This also runs for a call that is cancelled before a thread takes it.
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _future: object = None) -> None:
        with self._lock:
            self._calls -= 1


class LoadInterceptor(Interceptor):
    """Admits calls of a threaded server and reads single requests. Must be the last interceptor."""

    def __init__(self, pool: CountingPool, threads: int, waiting: int = MAX_WAITING) -> None:
        """``pool`` is the server's pool of ``threads`` threads. Up to ``waiting`` calls may wait
        for a thread."""
        self._pool = pool
        self._threads, self._waiting = threads, waiting
        self._vital = ThreadPoolExecutor(VITAL_THREADS, thread_name_prefix="vital")
        self._peers, self._vital_unread = Peers(PEER_CALLS), Peers(VITAL_UNREAD)
        self._reader = RequestReader()

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """See the base class."""
        if method in VITAL:
            return run_on(self._vital, self._vitally(handler))
        if self._pool.calls >= self._threads + self._waiting:
            return run_on(self._vital, remake(handler, self._refuse, unread=True))
        inner, read = behaviour_of(handler), self._read_by(handler)

        def call(requests: Any, context: grpc.ServicerContext) -> Any:
            with self._peers.present(context.peer()):
                return inner(read(requests, context), context)

        def call_streaming(requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._peers.present(context.peer()):
                yield from inner(read(requests, context), context)

        streaming = handler.response_streaming
        return remake(handler, call_streaming if streaming else call, unread=True)

    def _vitally(self, handler: Handler) -> Handler:
        inner, read = behaviour_of(handler), self._read_by(handler)

        def call(requests: Any, context: grpc.ServicerContext) -> Any:
            # Limits only the wait for the request, since handling a vital call takes almost no
            # time.
            with self._vital_unread.present(context.peer()):
                request = read(requests, context)
            return inner(request, context)

        return remake(handler, call, unread=True)

    def _read_by(self, handler: Handler) -> Callable[[Any, grpc.ServicerContext], Any]:
        parse: Any = handler.request_deserializer
        if handler.request_streaming:
            return lambda requests, _context: requests
        return lambda requests, context: self._reader.read(requests, context, parse)

    def _refuse(self, _requests: Any, _context: grpc.ServicerContext) -> Any:
        raise NotReady(
            f"the server has {self._threads} calls under way and {self._waiting} more that wait; "
            "try again, or start more shards"
        )


class AioLoadInterceptor(AioInterceptor):
    """Admits calls of an asyncio server and reads single requests. Must be the last interceptor."""

    def __init__(self, parked: int = MAX_PARKED) -> None:
        """``parked`` is the maximum number of concurrent calls, not counting vital ones."""
        self._parked = parked
        self._calls = 0
        self._peers, self._vital = Peers(PEER_CALLS), Peers(PEER_CALLS)

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """See the base class."""
        inner = behaviour_of(handler)
        parse: Any = handler.request_deserializer
        late = not handler.request_streaming
        served = self._vitally if method in VITAL else self._served

        async def call(requests: Any, context: Any) -> Any:
            with served(context.peer()):
                request = await read_request(context, parse) if late else requests
                return await inner(request, context)

        async def call_streaming(requests: Any, context: Any) -> AsyncIterator[Any]:
            with served(context.peer()):
                request = await read_request(context, parse) if late else requests
                async for response in inner(request, context):
                    yield response

        streaming = inspect.isasyncgenfunction(inner)
        return remake(handler, call_streaming if streaming else call, unread=True)

    @contextmanager
    def _served(self, peer: str) -> Iterator[None]:
        if self._calls >= self._parked:
            raise NotReady(f"the server has {self._calls} calls under way; try again")
        with self._peers.present(peer):
            self._calls += 1
            try:
                yield
            finally:
                self._calls -= 1

    def _vitally(self, peer: str) -> AbstractContextManager[None]:
        return self._vital.present(peer)


class Peers:
    """Counts the calls of each address and refuses more than ``most``. Thread-safe; never
    blocks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()

    @contextmanager
    def present(self, peer: str) -> Iterator[None]:
        """Counts a call of ``peer`` during the context; ``peer`` has gRPC's form
        ``ipv4:192.0.2.1:4711``. Ignores the port, which differs for each connection. Raises
        NotReady at the limit."""
        address = peer.rpartition(":")[0]
        with self._lock:
            if self._calls[address] >= self._most:
                raise NotReady(
                    f"{address.partition(':')[2]} has {self._most} calls under way, as many as one "
                    "address may have; try again"
                )
            self._calls[address] += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls[address] -= 1
                if not self._calls[address]:
                    del self._calls[address]
