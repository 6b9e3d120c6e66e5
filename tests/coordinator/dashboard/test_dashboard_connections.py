"""Useless connections to the dashboard do not make others wait."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest

from coordinator.dashboard.server import CONNECTIONS, MOST_CONNECTIONS, DashboardServer
from coordinator.dashboard.site import job_site
from coordinator.dashboard.snapshots import DashboardSnapshots

pytestmark = pytest.mark.slow

GUARD_S = 30.0
"""Of a test that hangs."""

SOON_S = 0.2
LONG_S = 3600.0

ASK = b"GET /icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"


@dataclass
class Server:
    """A dashboard with as much patience as a test gives it, for connections from then on."""

    dashboard: DashboardServer
    patience_s: float

    def connect(self) -> socket.socket:
        port = int(self.dashboard.url.rstrip("/").rpartition(":")[2])
        return socket.create_connection(("127.0.0.1", port), timeout=GUARD_S)

    def ask(self) -> bytes:
        """The first bytes of an answer."""
        with self.connect() as connection:
            connection.sendall(ASK)
            return connection.recv(12)


@pytest.fixture
def server() -> Iterator[Server]:
    board = DashboardSnapshots("digits", lambda: 1_800_000_000.0)
    dashboard = DashboardServer("127.0.0.1:0", job_site(board), patience_s=lambda: found.patience_s)
    found = Server(dashboard, SOON_S)
    dashboard.start()
    try:
        yield found
    finally:
        dashboard.stop()


def until_closed(connection: socket.socket, drip: bytes = b"") -> bytes:
    """All bytes until the other end hangs up; sends ``drip`` again and again meanwhile."""
    came = b""
    with suppress(ConnectionError):
        while True:
            waited_s = 0.02 if drip else GUARD_S
            if not select.select([connection], [], [], waited_s)[0]:
                assert drip, "it was not closed"
                connection.sendall(drip)
            elif more := connection.recv(65536):
                came += more
            else:
                break
    return came


def test_a_house_full_of_silent_ones_is_empty_again_after_a_while(server: Server) -> None:
    with ExitStack() as held:
        silent = [held.enter_context(server.connect()) for _ in range(CONNECTIONS)]
        for connection in silent:
            assert until_closed(connection) == b""
        server.patience_s = LONG_S
        assert server.ask() == b"HTTP/1.1 200"


def test_connections_over_the_bound_get_503_and_further_ones_are_closed(server: Server) -> None:
    server.patience_s = LONG_S
    with ExitStack() as held:
        for _ in range(CONNECTIONS):
            held.enter_context(server.connect())
        assert server.ask() == b"HTTP/1.1 503"
        more = [held.enter_context(server.connect()) for _ in range(MOST_CONNECTIONS - CONNECTIONS)]
        with server.connect() as late:
            assert until_closed(late) == b""
        more[0].sendall(ASK)
        assert more[0].recv(12) == b"HTTP/1.1 503"


@pytest.mark.parametrize(
    ("begin", "drip"),
    [
        (ASK[:30], b""),
        (ASK[:-2] + b"X: ", b"x"),
        (b"", b"G"),
        (POST, b"x"),
    ],
    ids=["half a head", "endless head", "endless method", "body byte by byte"],
)
def test_an_incomplete_request_has_a_deadline(server: Server, begin: bytes, drip: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(begin)
        came = until_closed(connection, drip)
    # A head that was whole had its answer.
    assert came[:12] == (b"HTTP/1.1 405" if begin == POST else b"")


def test_a_client_that_reads_no_answers_is_cut_off(server: Server) -> None:
    many = 1000 * ASK.replace(b"/icon.svg", b"/vendor/uPlot.js")

    def ask_for_ever() -> None:
        while True:
            connection.sendall(many)

    with server.connect() as connection, pytest.raises(ConnectionError):
        ask_for_ever()


def test_a_client_that_asks_in_time_stays(server: Server) -> None:
    server.patience_s = LONG_S
    with server.connect() as connection:
        server.patience_s = SOON_S
        connection.sendall(ASK)
        # The time runs anew from the answer, and ends.
        assert until_closed(connection).startswith(b"HTTP/1.1 200")
