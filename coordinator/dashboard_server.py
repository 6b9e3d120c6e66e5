"""The dashboard on the network: a thread with an event loop of its own beside the coordinator's."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.board import Board
from coordinator.dashboard_options import DEFAULT_PORT
from psrpc.channel import format_address, parse_address
from psrpc.errors import InvalidArgument, PortInUse
from psrpc.logs import get_logger
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

if TYPE_CHECKING:
    import uvicorn

log = get_logger()

LOOK_EVERY_S = 0.9
"""Between two looks at the job, at least: a bit less than two of the coordinator's ticks."""

CONNECTIONS = 64
"""At once; who comes on top is told to come again. A browser takes six at most."""

MOST_CONNECTIONS = 2 * CONNECTIONS
"""Who comes on top of these is told nothing."""

PATIENCE_S = 15.0
"""A connection on which no answer was completed for so long is closed, whatever came meanwhile. A
page that nobody looks at asks every ten seconds."""

GRACE_S = 1
"""What answers get that are under way when it stops."""

LAST_LOOK_S = 4.0
"""How long it stays for those who look on to see how the job has ended."""

SAVE_EVERY_S = 10.0
"""Seconds of history that a coordinator that is killed loses at most."""

_BACKLOG = 64


class DashboardServer:
    """Answers from ``start`` to ``stop``; looks at the job from ``open`` to ``close``. Used from
    one thread. Without an address it does nothing at all."""

    def __init__(
        self,
        address: str | None,
        board: Board,
        insecure: bool = False,
        patience_s: Callable[[], float] = lambda: PATIENCE_S,
    ) -> None:
        """
        Args:
            address: HOST:PORT; port 0 lets the system choose.
            insecure: whether others than this machine may look.
            patience_s: how long a connection may be of no use, asked for each time.
        """
        self._address = address
        self._board = board
        self._insecure = insecure
        self._patience_s = patience_s
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._status: Callable[[], GetJobStatusResponse] | None = None
        self._due = 0.0
        self.url = ""

    def start(self) -> None:
        """Takes the port and begins to answer; ``url`` says where.

        Raises:
            InvalidArgument: the address is not this machine's, or others could reach it.
            PortInUse: somebody else has the port.
        """
        if self._address is None:
            return
        # For those who want it only.
        import uvicorn

        from coordinator.dashboard import make_app
        from coordinator.dashboard_connection import bounded

        host, port = parse_address(self._address, default_port=DEFAULT_PORT)
        self._socket = self._listen(host, port)
        port = self._socket.getsockname()[1]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.url = f"http://{format_address(shown, port)}/"
        config = uvicorn.Config(
            make_app(self._board.status, self._board.history, {host, socket.gethostname()}),
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
        log.info("dashboard", url=self.url)

    def open(self, run_id: str, run_dir: Path, status: Callable[[], GetJobStatusResponse]) -> None:
        """The job has been read; ``status`` says how it stands, and is called by ``tick``."""
        if self._address is not None:
            self._board.open(run_id, run_dir)
            self._status = status

    def tick(self) -> None:
        """Looks at the job if it is time to."""
        now = time.monotonic()
        if self._status is not None and now >= self._due:
            self._due = now + LOOK_EVERY_S
            self._board.show(self._status())

    def close(self) -> None:
        """Looks at the job for the last time."""
        if self._status is not None:
            self._board.show(self._status())
            self._status = None

    def stop(self) -> None:
        """Answers no more, and keeps the history; blocks for a moment. May be called twice."""
        if self._server is not None and self._thread is not None:
            self._board.wait_until_seen(LAST_LOOK_S)
            self._server.should_exit = True
            self._thread.join(GRACE_S + 2)
            self._server = self._thread = None
            self._board.save()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _listen(self, host: str, port: int) -> socket.socket:
        where = format_address(host, port)
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise InvalidArgument(
                f"--dashboard {where}: {error.strerror}; say an address of this machine"
            ) from None
        if not (self._insecure or ipaddress.ip_address(address[0]).is_loopback):
            raise InvalidArgument(
                f"--dashboard {where} would show the job to whoever reaches this machine, without "
                "encryption and without asking who it is; say 127.0.0.1 and look through a tunnel "
                f"(ssh -L {port}:127.0.0.1:{port} HOST) or a proxy that asks for a password; only "
                "a job without certificates, in plaintext (--insecure), is shown to everybody"
            )
        listener = socket.socket(family, kind, proto)
        try:
            # A coordinator that is started again gets the port of the one before.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise PortInUse(
                f"cannot serve the dashboard at {where}: {error.strerror}; say another --dashboard"
            ) from None
        return listener

    def _run(self, server: uvicorn.Server, listener: socket.socket) -> None:
        try:
            asyncio.run(self._serve(server, listener))
        except Exception as error:
            # Whoever trains goes on; who looks sees that nobody answers.
            log.exception("the dashboard has stopped", why=repr(error))

    async def _serve(self, server: uvicorn.Server, listener: socket.socket) -> None:
        saving = asyncio.create_task(self._save_now_and_then())
        try:
            await server.serve(sockets=[listener])
        finally:
            saving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await saving

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await asyncio.to_thread(self._board.save)
