"""Authorizes calls to threaded and asyncio servers before their requests are read;
:mod:`psrpc.net.overload` reads those later."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc

from psrpc.core.errors import AccessDenied
from psrpc.ops.logs import get_logger
from psrpc.security.credentials import TOKEN_KEY, Security
from psrpc.security.identity import roles_of
from psrpc.security.peer_certificate import LOOK_S, LiveCalls, peer_of
from psrpc.wire.interceptor import AioInterceptor, Handler, Interceptor, behaviour_of, remake
from psrpc.wire.status import details, trailing_metadata

log = get_logger()

_BEARER = b"Bearer "

_MOST_TOLD = 256
"""Maximum number of different refusals that are logged."""

Refusal = tuple[grpc.StatusCode, AccessDenied]


class Authorizer:
    """Authorizes calls to one server. Thread-safe."""

    def __init__(self, security: Security) -> None:
        """``security`` has the settings of the server, which has certificates."""
        self._security = security
        self._job = security.job
        self._told: set[str] = set()

    def refusal(self, method: str, context: Any) -> Refusal | None:
        """Returns why the call with ``context`` is not allowed; None if it is."""
        refused = (
            self._of_token(method, context)
            if self._security.by_token
            else self._of_certificate(method, context)
        )
        if refused is not None and len(self._told) < _MOST_TOLD:
            why = str(refused[1])
            if why not in self._told:
                self._told.add(why)
                log.warning("refused", method=method, peer=context.peer(), why=why)
        return refused

    def _of_certificate(self, method: str, context: Any) -> Refusal | None:
        shown = peer_of(context)
        peer = shown.identity
        if peer is None:
            return grpc.StatusCode.UNAUTHENTICATED, AccessDenied(
                f"the certificate of the caller of {_short(method)} names no role of job "
                f"{self._job}; make one with `coordinator certs`",
                code="PS302",
            )
        if peer.job != self._job:
            return grpc.StatusCode.PERMISSION_DENIED, AccessDenied(
                f"{peer} calls {_short(method)} of job {self._job}; say --certs with the "
                "directory of that job, or the address of the other",
                code="PS303",
            )
        objection = self._security.objection(shown)
        if objection is not None:
            return grpc.StatusCode.UNAUTHENTICATED, objection
        roles = roles_of(method)
        if peer.role not in roles:
            return grpc.StatusCode.PERMISSION_DENIED, AccessDenied(
                f"{peer.role.one} may not call {_short(method)}; expected "
                f"{' or '.join(sorted(roles)) or 'no role'}"
            )
        return None

    def _of_token(self, method: str, context: Any) -> Refusal | None:
        sent = [value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY]
        token = _bytes(sent[0]) if len(sent) == 1 else b""
        if not token.startswith(_BEARER) or not self._security.knows_token(token[len(_BEARER) :]):
            what = "another token" if sent else "no token"
            return grpc.StatusCode.UNAUTHENTICATED, AccessDenied(
                f"{_short(method)} was called with {what}; say --token-file with a copy of the "
                f"file that job {self._job} uses",
                code="PS302",
            )
        if not roles_of(method):
            return grpc.StatusCode.PERMISSION_DENIED, AccessDenied(
                f"no role may call {_short(method)}"
            )
        return None


class AuthorizationInterceptor(Interceptor):
    """Authorizes the calls of a threaded server. Must be the first interceptor."""

    def __init__(self, security: Security, look_s: float = LOOK_S) -> None:
        """``look_s`` is the interval between checks of open calls."""
        self._authorizer = Authorizer(security)
        self.live = LiveCalls(security.objection, look_s)

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """See the base class."""
        inner = behaviour_of(handler)

        @contextmanager
        def admitted(context: grpc.ServicerContext) -> Iterator[None]:
            refused = self._authorizer.refusal(method, context)
            if refused is not None:
                _abort(context, refused)
            end: Any = context.cancel
            with self.live.present(peer_of(context), method, end):
                yield

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            with admitted(context):
                return inner(request, context)

        def call_streaming(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with admitted(context):
                yield from inner(request, context)

        return remake(handler, call_streaming if handler.response_streaming else call)


class AioAuthorizationInterceptor(AioInterceptor):
    """Authorizes the calls of an asyncio server. Must be the first interceptor."""

    def __init__(self, security: Security, look_s: float = LOOK_S) -> None:
        """See :class:`AuthorizationInterceptor`."""
        self._authorizer = Authorizer(security)
        self.live = LiveCalls(security.objection, look_s)

    def wrapped(self, handler: Handler, method: str) -> Handler:
        """See the base class."""
        inner = behaviour_of(handler)

        async def admit(context: Any) -> _Ending:
            refused = self._authorizer.refusal(method, context)
            if refused is not None:
                code, error = refused
                await context.abort(code, details(error), trailing_metadata(error))
            return _Ending()

        async def call(request: Any, context: Any) -> Any:
            ending = await admit(context)
            try:
                with self.live.present(peer_of(context), method, ending.end):
                    return await inner(request, context)
            except asyncio.CancelledError:
                await ending.abort(context)
                raise
            finally:
                ending.over = True

        async def call_streaming(request: Any, context: Any) -> AsyncIterator[Any]:
            ending = await admit(context)
            try:
                with self.live.present(peer_of(context), method, ending.end):
                    async for response in inner(request, context):
                        yield response
            except asyncio.CancelledError:
                await ending.abort(context)
                raise
            finally:
                ending.over = True

        streaming = inspect.isasyncgenfunction(inner)
        return remake(handler, call_streaming if streaming else call)


class _Ending:
    """Ends a call of an asyncio server from any thread.

    The call ends with UNAVAILABLE, so that the caller connects again. That succeeds if the caller
    has a new certificate by now; otherwise the next error says why it is refused."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._ended = False
        self.over = False
        """Whether the call has ended by itself; its task must not be cancelled any more, since gRPC
        uses it."""

    def end(self) -> None:
        """Ends the call. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and not self.over:
            self._ended = True
            self._task.cancel()

    async def abort(self, context: Any) -> None:
        """Aborts the call, in its cancelled task. Does nothing if the task was not cancelled by
        :meth:`end`."""
        if self._ended and self._task is not None:
            self._task.uncancel()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the certificate counts no more")


def _abort(context: grpc.ServicerContext, refused: Refusal) -> NoReturn:
    code, error = refused
    context.set_trailing_metadata(trailing_metadata(error))
    context.abort(code, details(error))


def _short(method: str) -> str:
    return method.rpartition("/")[2]


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
