"""Reads the request of a call that has one: when somebody asks for it, and not before. Until then
it is not in this process's memory, and whoever makes the call may have been refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from psrpc.net.limits import REQUEST_S
from psrpc.wire.bounds import check_bounds

Parse = Callable[[bytes], Any] | None
"""Makes a message of bytes; None for those whose message is the bytes."""

_UNREADABLE = "Exception deserializing request!"
_MISSING = "expected exactly one request message"
"""Both are what gRPC says, more or less."""


class RequestReader:
    """For servers with threads. Thread-safe.

    A thread that waits for a request cannot be told to stop, so calls that let it wait are
    cancelled, by one timer for all of them.
    """

    def __init__(self, limit_s: float = REQUEST_S) -> None:
        """``limit_s``: how long a request may be awaited, and at most twice that."""
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._awaited: dict[grpc.ServicerContext, float] = {}
        self._timer: threading.Timer | None = None

    def read(self, requests: Iterator[bytes], context: grpc.ServicerContext, parse: Parse) -> Any:
        """The request. Ends the call if there is none, or it is none.

        Raises:
            InvalidArgument: see :func:`psrpc.wire.bounds.check_bounds`.
        """
        with self._waiting(context):
            data = next(requests, None)
        if data is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, _MISSING)
        if parse is None:
            return data
        try:
            request = parse(data)
        except Exception:
            context.abort(grpc.StatusCode.INTERNAL, _UNREADABLE)
        _check(request, data)
        return request

    @contextmanager
    def _waiting(self, context: grpc.ServicerContext) -> Iterator[None]:
        with self._lock:
            self._awaited[context] = time.monotonic()
            if self._timer is None:
                self._look_later()
        try:
            yield
        finally:
            with self._lock:
                del self._awaited[context]

    def _look(self) -> None:
        late = time.monotonic() - self._limit_s
        with self._lock:
            overdue = [context for context, since in self._awaited.items() if since <= late]
            self._timer = None
            if self._awaited:
                self._look_later()
        for context in overdue:
            context.cancel()  # type: ignore[no-untyped-call]  # grpc's

    def _look_later(self) -> None:
        self._timer = threading.Timer(self._limit_s, self._look)
        self._timer.daemon = True
        self._timer.start()


async def read_request(context: Any, parse: Parse, limit_s: float = REQUEST_S) -> Any:
    """The same for asyncio servers; a request that is not there in time ends the call, too."""
    try:
        async with asyncio.timeout(limit_s):
            data = await context.read()
    except TimeoutError:
        await context.abort(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"the request did not come within {limit_s:g} s"
        )
    if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs forget it
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _MISSING)
    if parse is None:
        return data
    try:
        request = parse(data)
    except Exception:
        await context.abort(grpc.StatusCode.INTERNAL, _UNREADABLE)
    _check(request, data)
    return request


def _check(request: Any, data: bytes) -> None:
    if isinstance(request, Message):
        check_bounds(request, len(data))
