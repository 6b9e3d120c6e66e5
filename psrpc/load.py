"""Who is served when more is asked than can be done, for both kinds of server.

Some calls are vital (:data:`psrpc.limits.VITAL`): they have threads of their own, or come on top of
what is counted. Of the others a bounded number is served, a bounded number waits, and all further
ones get NotReady at once, which clients try again.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from psrpc.errors import NotReady
from psrpc.interceptor import (
    AioInterceptor,
    Handler,
    Interceptor,
    behaviour_of,
    remake,
    run_on,
)
from psrpc.limits import MAX_PARKED, MAX_WAITING, VITAL, VITAL_THREADS


class CountingPool(ThreadPoolExecutor):
    """Threads that know how many calls they have. Thread-safe."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="rpc")
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def calls(self) -> int:
        """Those that run and those that wait."""
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
        # Also of a call that was given up before a thread took it.
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _future: object = None) -> None:
        with self._lock:
            self._calls -= 1


class LoadInterceptor(Interceptor):
    """For servers with threads; the last of a server's interceptors."""

    def __init__(self, pool: CountingPool, threads: int, waiting: int = MAX_WAITING) -> None:
        """Args:
        pool: the server's.
        threads: that it has.
        waiting: calls that may wait for one.
        """
        self._pool = pool
        self._threads, self._waiting = threads, waiting
        self._vital = ThreadPoolExecutor(VITAL_THREADS, thread_name_prefix="vital")

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """See the base class."""
        if method in VITAL:
            return run_on(self._vital, handler)
        if self._pool.calls >= self._threads + self._waiting:
            return run_on(self._vital, remake(handler, self._refuse))
        return handler

    def _refuse(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        raise NotReady(
            f"the server has {self._threads} calls under way and {self._waiting} more that wait; "
            "try again, or start more shards"
        )


class AioLoadInterceptor(AioInterceptor):
    """For asyncio servers; the last of a server's interceptors."""

    def __init__(self, parked: int = MAX_PARKED) -> None:
        """``parked`` calls are served at once, beside vital ones."""
        self._parked = parked
        self._calls = 0

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """See the base class."""
        if method in VITAL:
            return handler
        inner = behaviour_of(handler)

        async def call(request: Any, context: Any) -> Any:
            self._enter()
            try:
                return await inner(request, context)
            finally:
                self._calls -= 1

        async def call_streaming(request: Any, context: Any) -> AsyncIterator[Any]:
            self._enter()
            try:
                async for response in inner(request, context):
                    yield response
            finally:
                self._calls -= 1

        streaming = inspect.isasyncgenfunction(inner)
        return remake(handler, call_streaming if streaming else call)

    def _enter(self) -> None:
        if self._calls >= self._parked:
            raise NotReady(f"the server has {self._calls} calls under way; try again")
        self._calls += 1
