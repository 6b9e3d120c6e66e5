"""A small read-only server of HTTP/1 or HTTPS, with one answer per connection.

Slow or numerous clients do not lock others out. One thread serves all connections. The TLS
handshake and the request head share a deadline, and the answer has another. If there are too many
connections, a new one replaces the oldest connection without a request.

uvicorn, which serves the dashboard, is not used here: it has no deadline before the first answer,
and answers 503 to all clients when it has too many connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from psrpc.metrics.http_head import BadRequest, Head, parse_head
from psrpc.ops.logs import get_logger

log = get_logger()

BACKLOG = 128
_OVERLOADED_S = 0.1
"""Pause when the process has no descriptors left."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for clients.

    Attributes:
        head_s: deadline for TLS handshake and request head.
        answer_s: deadline for making and sending the answer.
        head_bytes: size of a request head.
        connections: maximum number of concurrent connections; at most ``of_one_address`` of them
            may be from one address.
    """

    head_s: float = 5.0
    answer_s: float = 15.0
    head_bytes: int = 8192
    connections: int = 128
    of_one_address: int = 48


BOUNDS = Bounds()


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response. ``body`` is not sent in reply to HEAD."""

    status: int
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = field(default=())


Respond = Callable[[Head, bytes | None], Awaitable[Answer]]
"""Answers a request, given the client's certificate (DER), or None without TLS."""


class HttpServer:
    """Serves on its own thread from ``start`` to ``stop``. Thread-safe."""

    def __init__(
        self,
        respond: Respond,
        context: Callable[[], ssl.SSLContext] | None = None,
        bounds: Bounds = BOUNDS,
        name: str = "http",
    ) -> None:
        """``respond`` runs in the event loop of a thread called ``name``. ``context`` returns the
        TLS context of each connection; if it is None, serves plain HTTP."""
        self._respond = respond
        self._context = context
        self._bounds = bounds
        self._seats = Seats(bounds.connections, bounds.of_one_address)
        self._loop = asyncio.new_event_loop()
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._accepting: asyncio.Task[None] | None = None

    def start(self, host: str, port: int) -> int:
        """Starts to serve; returns the port. Raises OSError."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            self._loop.close()
            raise
        self._listener = listener
        # The reference protects the task from garbage collection.
        self._accepting = self._loop.create_task(self._accept(listener))
        self._thread.start()
        return int(listener.getsockname()[1])

    def stop(self) -> None:
        """Stops serving and ends open connections."""
        if self._listener is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._listener = None

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            # Aborted connections close in the next turn of the loop.
            loop.run_until_complete(asyncio.sleep(0))
        finally:
            if self._listener is not None:
                self._listener.close()
            loop.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(listener)
            except OSError as error:
                log.warning("no connection taken", why=error.strerror)
                await asyncio.sleep(_OVERLOADED_S)
                continue
            task = self._loop.create_task(self._serve(connection))
            leaves: Any = self._seats.take(task, str(address[0]))
            if leaves is not None:
                leaves.cancel()
            task.add_done_callback(functools.partial(self._left, connection))

    def _left(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        # Closes the socket here, too, because the task may have been cancelled before it began.
        connection.close()
        self._seats.leave(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a connection failed", why=repr(error))

    async def _serve(self, connection: socket.socket) -> None:
        reader = asyncio.StreamReader(limit=self._bounds.head_bytes)
        transport: asyncio.Transport | None = None
        # Ignore clients that disconnect or are too slow.
        try:
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(self._bounds.head_s):
                    transport, protocol = await self._loop.connect_accepted_socket(
                        lambda: asyncio.StreamReaderProtocol(reader),
                        connection,
                        ssl=self._context() if self._context else None,
                    )
                    head = await _read_head(reader)
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                async with asyncio.timeout(self._bounds.answer_s):
                    await self._answer(head, writer)
        finally:
            # `abort`, because `close` would wait for clients that do not read.
            if transport is not None:
                transport.abort()
            else:
                connection.close()

    async def _answer(self, head: Head | BadRequest, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        self._seats.asked(task)
        if isinstance(head, BadRequest):
            answer = Answer(head.status, f"{head}\n".encode())
        elif head.method not in ("GET", "HEAD"):
            words = b"This server is read-only; use GET or HEAD.\n"
            answer = Answer(405, words, headers=(("Allow", "GET, HEAD"),))
        else:
            tls: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
            answer = await self._respond(head, tls.getpeercert(binary_form=True) if tls else None)
        bodiless = isinstance(head, Head) and head.method == "HEAD"
        # With a limit of 0, drain returns once all is sent.
        writer.transport.set_write_buffer_limits(high=0)
        writer.write(_encoded(answer, bodiless))
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> Head | BadRequest:
    try:
        return parse_head(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.LimitOverrunError:
        return BadRequest(431, "the head of the request is too large")
    except BadRequest as error:
        return error


def _encoded(answer: Answer, bodiless: bool) -> bytes:
    status = HTTPStatus(answer.status)
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in answer.headers),
    ]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head if bodiless else head + answer.body


class Seats:
    """Decides which connections stay: at most ``most``, and at most ``most_of_one`` from one
    address. Not thread-safe.

    A new connection always gets a seat, so that silent clients cannot lock others out. If all seats
    are taken, it replaces the oldest connection without a request, or the oldest one if all have
    sent a request. If its address is at its limit, it replaces one of that address.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._seats: dict[Hashable, tuple[str, bool]] = {}
        """Connection -> its address, and whether it has sent its request; oldest first."""

    def __len__(self) -> int:
        return len(self._seats)

    def take(self, connection: Hashable, address: str) -> Hashable | None:
        """Seats a new connection; returns the one that lost its seat, for the caller to close."""
        mine = [one for one, (where, _) in self._seats.items() if where == address]
        leaves = None
        if len(mine) >= self._most_of_one:
            leaves = self._first(mine)
        elif len(self._seats) >= self._most:
            leaves = self._first(list(self._seats))
        if leaves is not None:
            del self._seats[leaves]
        self._seats[connection] = (address, False)
        return leaves

    def asked(self, connection: Hashable) -> None:
        """Records that ``connection`` has sent its request."""
        if connection in self._seats:
            address, _ = self._seats[connection]
            self._seats[connection] = (address, True)

    def leave(self, connection: Hashable) -> None:
        """Frees the seat of ``connection``, if it still has one."""
        self._seats.pop(connection, None)

    def _first(self, among: list[Hashable]) -> Hashable:
        return next((one for one in among if not self._seats[one][1]), among[0])
