"""Wraps all handlers of threaded and asyncio servers, and turns errors into gRPC status.

The body of a streaming handler runs while gRPC iterates over its result, after the call has
returned, so interceptors wrap the iteration as well as the call.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from psrpc.core.errors import AccessDenied, PsError
from psrpc.ops.logs import get_logger
from psrpc.wire.status import CODES, details, trailing_metadata

log = get_logger()

MOST_TOLD = 256
"""Maximum number of different texts of forbidden calls that a server logs as warnings."""

_POOL = "experimental_thread_pool"
"""The attribute of a behaviour from which gRPC takes the pool to run it on; :func:`remake` keeps
it."""


def remake(
    handler: Any, behaviour: Callable[..., Any], unread: bool = False
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns ``handler`` with another behaviour. With ``unread``, a single request becomes a
    stream of one bytes object, so gRPC reads it only when the behaviour does."""
    late = unread and not handler.request_streaming
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(handler.request_streaming or late, handler.response_streaming)]
    remade = make(
        behaviour,
        request_deserializer=None if late else handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    pool = getattr(behaviour_of(handler), _POOL, None)
    return remade if pool is None or hasattr(behaviour, _POOL) else run_on(pool, remade)


def run_on(pool: ThreadPoolExecutor, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """Makes a threaded server run ``handler`` on ``pool`` instead of its own threads."""
    inner = behaviour_of(handler)

    def call(request: Any, context: Any) -> Any:
        return inner(request, context)

    setattr(call, _POOL, pool)
    return remake(handler, call)


def behaviour_of(handler: Any) -> Callable[..., Any]:
    """Returns the behaviour of a handler of any kind."""
    behaviour: Callable[..., Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return behaviour


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Interceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of a threaded server."""

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """Returns the handler for a call to ``method``; runs before the call has a thread."""
        raise NotImplementedError

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.ServerInterceptor."""
        handler = continuation(handler_call_details)
        return handler and self.wrapped(handler, handler_call_details.method)


class AioInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of an asyncio server. Such a server asks for the handler at every call;
    each handler is wrapped only once."""

    _made: dict[str, tuple[Handler, Handler]] | None = None
    """Method -> the handler and its wrapped form."""

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """Returns the handler for a call to ``method``."""
        raise NotImplementedError

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        # An unknown method has no handler, despite the type stubs.
        if not handler:
            return handler
        method = handler_call_details.method
        self._made = {} if self._made is None else self._made
        made = self._made.get(method)
        if made is None or made[0] is not handler:
            made = self._made[method] = handler, self.wrapped(handler, method)
        return made[1]


class _Refusals:
    """Logs refused calls. Thread-safe."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def log(self, method: str, peer: str, error: PsError) -> None:
        """Logs a refused call. Warns once about each text of a forbidden call, since its caller is
        broken or malicious."""
        why = str(error)
        new = why not in self._warned and len(self._warned) < MOST_TOLD
        if isinstance(error, AccessDenied) and new:
            self._warned.add(why)
            log.warning("refused", method=method, peer=peer, why=error.coded)
        else:
            log.debug("refused", method=method, error=type(error).__name__, why=why)


class ErrorInterceptor(Interceptor):
    """Turns errors of a threaded server's handlers into gRPC status."""

    def __init__(self) -> None:
        self._refusals = _Refusals()

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """See the base class."""
        inner = behaviour_of(handler)

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return inner(request, context)
            except PsError as error:
                self._refusals.log(method, context.peer(), error)
                _abort(context, error)

        def call_streaming(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                yield from inner(request, context)
            except PsError as error:
                self._refusals.log(method, context.peer(), error)
                _abort(context, error)

        streaming = handler.response_streaming
        return remake(handler, call_streaming if streaming else call)


def _abort(context: grpc.ServicerContext, error: PsError) -> NoReturn:
    context.set_trailing_metadata(trailing_metadata(error))
    context.abort(CODES[type(error)], details(error))


class AioErrorInterceptor(AioInterceptor):
    """Turns errors of an asyncio server's handlers into gRPC status."""

    def __init__(self) -> None:
        self._refusals = _Refusals()

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """See the base class."""
        inner = behaviour_of(handler)

        async def call(request: Any, context: Any) -> Any:
            try:
                return await inner(request, context)
            except PsError as error:
                self._refusals.log(method, context.peer(), error)
                await _abort_aio(context, error)

        async def call_streaming(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in inner(request, context):
                    yield response
            except PsError as error:
                self._refusals.log(method, context.peer(), error)
                await _abort_aio(context, error)

        # A streaming handler may also be a coroutine that writes, like the health service's.
        streaming = inspect.isasyncgenfunction(inner)
        return remake(handler, call_streaming if streaming else call)


async def _abort_aio(context: Any, error: PsError) -> NoReturn:
    await context.abort(CODES[type(error)], details(error), trailing_metadata(error))
    raise AssertionError("abort raises")
