"""Reads the single request of a call on demand. Until then the server can still refuse the call,
and the request takes none of its memory."""

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
"""Parses a message from bytes; None if the bytes themselves are the message."""

_UNREADABLE = "Exception deserializing request!"
_MISSING = "expected exactly one request message"
"""Like gRPC's own text."""


class RequestReader:
    """Reads requests for threaded servers. Thread-safe.

    A thread that waits for a request cannot be interrupted, so one timer cancels all overdue calls.
    """

    def __init__(self, limit_s: float = REQUEST_S) -> None:
        """Cancels calls whose request takes longer than ``limit_s``; the cancellation may come as
        late as twice that."""
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._awaited: dict[grpc.ServicerContext, float] = {}
        self._timer: threading.Timer | None = None

    def read(self, requests: Iterator[bytes], context: grpc.ServicerContext, parse: Parse) -> Any:
        """Returns the request. Aborts the call if it is missing or unreadable.

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
    """Reads the request of a call to an asyncio server. Aborts the call if the request is missing,
    unreadable, or does not arrive within ``limit_s``. Raises as :meth:`RequestReader.read`."""
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
