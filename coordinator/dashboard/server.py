"""The dashboard's web server: a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

from psrpc.core.errors import InvalidArgument, PortInUse
from psrpc.net.channel import format_address, parse_address
from psrpc.ops.logs import get_logger
from psrpc.options.settings import DASHBOARD_PORT

if TYPE_CHECKING:
    import uvicorn

    from coordinator.dashboard.site import Site

log = get_logger()

CONNECTIONS = 64
"""Maximum of connections at once; further ones are asked to retry. A browser opens six at most."""

MOST_CONNECTIONS = 2 * CONNECTIONS
"""Connections beyond these are closed without an answer."""

PATIENCE_S = 15.0
"""A connection without a completed answer for so long is closed, even if data arrives. A page in
the background asks every ten seconds."""

GRACE_S = 1
"""Seconds for answers in progress when the server stops."""

_BACKLOG = 64
_OPTION = "--dashboard"

ELSEWHERE = (
    "and look from another machine with `coordinator dashboard --coordinator HOST:PORT --certs "
    "DIR` there; only a job without certificates, in plaintext (--insecure), is shown to everybody"
)
"""Advice on how to view a job with certificates from another machine."""


class DashboardServer:
    """Serves from ``start`` to ``stop``; used from one thread. Does nothing without an address."""

    def __init__(
        self,
        address: str | None,
        site: Site,
        insecure: bool = False,
        option: str = _OPTION,
        instead: str = ELSEWHERE,
        patience_s: Callable[[], float] = lambda: PATIENCE_S,
    ) -> None:
        """
        Args:
            address: HOST:PORT, where port 0 lets the system choose; None for no dashboard.
            site: the pages and their data.
            insecure: whether other machines may view the pages.
            option: the name of the option that sets the address.
            instead: advice in the error for an address that other machines reach.
            patience_s: how long a connection may go without a completed answer, read each time.
        """
        self._address = address
        self._site = site
        self._insecure = insecure
        self._option = option
        self._instead = instead
        self._patience_s = patience_s
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.url = ""

    def start(self) -> None:
        """Takes the port and serves from now on; sets ``url``.

        Raises:
            InvalidArgument: the address is not this machine's, or other machines could reach it.
            PortInUse: another process has the port.
        """
        if self._address is None:
            return
        # Imported only if the dashboard is on.
        import uvicorn

        from coordinator.dashboard.app import make_app

        host, port = parse_address(self._address, default_port=DASHBOARD_PORT)
        self._socket = _listen(host, port, self._insecure, self._option, self._instead)
        port = self._socket.getsockname()[1]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.url = f"http://{format_address(shown, port)}/"
        config = uvicorn.Config(
            make_app(self._site, {host, socket.gethostname()}),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            http=bounded(self._patience_s, MOST_CONNECTIONS),
            ws="none",
            loop="asyncio",
            proxy_headers=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            backlog=_BACKLOG,
            timeout_keep_alive=round(PATIENCE_S),
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._run, args=(self._server, self._socket), name="dashboard", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stops serving; blocks for a moment. May be called twice."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(GRACE_S + 2)
            self._server = self._thread = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _run(self, server: uvicorn.Server, listener: socket.socket) -> None:
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except Exception as error:
            # Training goes on; browsers see that the server does not answer.
            log.exception("the dashboard has stopped", why=repr(error))


def check_address(address: str, insecure: bool) -> None:
    """Checks that the dashboard of a job can be served at HOST:PORT now. Raises as
    :meth:`DashboardServer.start`."""
    host, port = parse_address(address, default_port=DASHBOARD_PORT)
    _listen(host, port, insecure, _OPTION, ELSEWHERE).close()


def _listen(host: str, port: int, insecure: bool, option: str, instead: str) -> socket.socket:
    where = format_address(host, port)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise InvalidArgument(
            f"{option} {where}: {error.strerror}; say an address of this machine"
        ) from None
    if not (insecure or ipaddress.ip_address(address[0]).is_loopback):
        raise InvalidArgument(
            f"{option} {where} would show the job to anyone who reaches this machine, "
            f"without encryption or authentication; say 127.0.0.1, {instead}"
        )
    listener = socket.socket(family, kind, proto)
    try:
        # Lets a restarted coordinator take the port of its predecessor.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"cannot serve the dashboard at {where}: {error.strerror}; say another {option}"
        ) from None
    return listener


def bounded(patience_s: Callable[[], float], most: int) -> type[H11Protocol]:
    """Returns the protocol of a server that closes connections without a completed answer in time.

    The time runs from the start of the connection, and anew from each completed answer, whatever
    arrives meanwhile. So it also ends connections that send nothing, send byte by byte, or do not
    read their answers.

    Args:
        patience_s: returns that time in seconds.
        most: maximum of connections at once; a further one is closed without an answer.
    """

    class Connection(H11Protocol):
        _end: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            self._wait()
            if len(self.connections) > most:
                transport.abort()

        def on_response_complete(self) -> None:
            self._wait()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._end is not None:
                self._end.cancel()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._end is not None:
                self._end.cancel()
            # Not `close`, which waits until the client has read everything.
            self._end = self.loop.call_later(patience_s(), lambda: self.transport.abort())

    return Connection
