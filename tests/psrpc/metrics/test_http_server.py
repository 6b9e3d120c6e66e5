"""Isolation between clients of ``/metrics``, on real sockets; and the requests they may make."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily

import worker.cli.__main__
from coordinator.certificates.authority import make_certificates
from psrpc.metrics.exporter import Family, MetricsServer, _Pages
from psrpc.metrics.http_head import BadRequest, parse_head
from psrpc.metrics.http_server import Answer, Bounds, HttpServer, Seats
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role, server_name

JOB = "tiny"
WAIT_S = 30.0
SLOW = 64
PATIENT = Bounds(head_s=WAIT_S, answer_s=WAIT_S)
"""No client is too slow: what others still get, they get in spite of all that have come."""

HALF_HELLO = bytes.fromhex("160301020001")
"""The beginning of a TLS handshake."""


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / JOB
    make_certificates(directory, JOB, datetime.now(UTC))
    return directory


def families() -> Iterator[Family]:
    yield GaugeMetricFamily("worker_version", "Updates.", value=7)


def dialled(address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), WAIT_S)


def read(connection: socket.socket) -> bytes:
    found = b""
    while more := connection.recv(1 << 16):
        found += more
    return found


def asked(address: str, said: bytes) -> bytes:
    with dialled(address) as connection:
        connection.sendall(said)
        return read(connection)


def scrape(address: str, certs: Path | None, host: str = "127.0.0.1") -> bytes:
    said = f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    if certs is None:
        return asked(address, said)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certs / "ca.crt")
    context.load_cert_chain(certs / "reader.crt", certs / "reader.key")
    name = server_name(JOB, Role.WORKER)
    with context.wrap_socket(dialled(address), server_hostname=name) as tls:
        tls.sendall(said)
        return read(tls)


def nothing(_connection: socket.socket) -> None:
    """Connects, and that is all."""


def half_a_head(connection: socket.socket) -> None:
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")


def half_a_handshake(connection: socket.socket) -> None:
    connection.sendall(HALF_HELLO)


def a_head_and_no_reading(connection: socket.socket) -> None:
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")


SLOWNESS = [nothing, half_a_head, half_a_handshake, a_head_and_no_reading]


@contextlib.contextmanager
def crowd(address: str, slow: Callable[[socket.socket], None]) -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        for _ in range(SLOW):
            connection = opened.enter_context(dialled(address))
            with contextlib.suppress(OSError):
                slow(connection)
        yield


@pytest.mark.parametrize("slow", SLOWNESS)
def test_slow_clients_keep_no_scrape_out(
    slow: Callable[[socket.socket], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        MetricsServer("127.0.0.1:0", families, Security(Role.WORKER), PATIENT) as server,
        crowd(server.address, slow),
    ):
        assert b"\nworker_version 7.0\n" in scrape(server.address, None)
        assert worker.cli.__main__.run(["healthcheck", server.address]) == 0, (
            capsys.readouterr().err
        )


@pytest.mark.parametrize("slow", SLOWNESS)
def test_nor_where_it_is_https(
    certs: Path, slow: Callable[[socket.socket], None], capsys: pytest.CaptureFixture[str]
) -> None:
    security = Security.from_options(Role.WORKER, certs)
    with (
        MetricsServer("0.0.0.0:0", families, security, PATIENT) as server,
        crowd(server.address, slow),
    ):
        assert b"\nworker_version 7.0\n" in scrape(server.address, certs)
        healthcheck = ["healthcheck", server.address, "--certs", str(certs)]
        assert worker.cli.__main__.run(healthcheck) == 0, capsys.readouterr().err


@pytest.mark.parametrize("slow", [nothing, half_a_head, half_a_handshake])
@pytest.mark.parametrize("encrypted", [True, False])
def test_handshake_and_head_have_one_deadline(
    certs: Path, slow: Callable[[socket.socket], None], encrypted: bool
) -> None:
    security = Security.from_options(Role.WORKER, certs) if encrypted else PLAINTEXT
    where = "0.0.0.0:0" if encrypted else "127.0.0.1:0"
    with (
        MetricsServer(where, families, security, Bounds(head_s=0.02)) as server,
        dialled(server.address) as connection,
    ):
        slow(connection)
        with contextlib.suppress(ConnectionError):
            assert read(connection) == b""


def test_an_unread_answer_has_a_deadline() -> None:
    done = threading.Event()

    async def respond(_head: object, _certificate: bytes | None) -> Answer:
        return Answer(200, bytes(64 << 20))

    class Watched(HttpServer):
        async def _serve(self, connection: socket.socket) -> None:
            try:
                await super()._serve(connection)
            finally:
                done.set()

    server = Watched(respond, bounds=Bounds(answer_s=0.02))
    port = server.start("127.0.0.1", 0)
    try:
        with dialled(f":{port}") as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert done.wait(WAIT_S)
    finally:
        server.stop()


def test_figures_that_take_long_are_collected_once_for_all_that_wait() -> None:
    """And health needs none."""
    begun, go_on = threading.Semaphore(0), threading.Event()
    counted = [0]

    def collect() -> Iterator[Family]:
        counted[0] += 1
        begun.release()
        assert go_on.wait(WAIT_S)
        return families()

    async def main() -> None:
        pages = _Pages(collect, Security(Role.WORKER), "127.0.0.1", encrypted=False)
        ask = parse_head(b"GET /metrics HTTP/1.0\r\n\r\n")
        first = asyncio.ensure_future(pages.respond(ask, None))
        await asyncio.to_thread(begun.acquire, timeout=WAIT_S)
        more = [asyncio.ensure_future(pages.respond(ask, None)) for _ in range(10)]
        health = await pages.respond(parse_head(b"GET /healthz HTTP/1.0\r\n\r\n"), None)
        assert (health.status, health.body) == (200, b"worker\n")
        go_on.set()
        answers = await asyncio.gather(first, *more)
        assert all(b"worker_version" in answer.body for answer in answers)
        pages.close()

    asyncio.run(main())
    assert counted[0] == 2


def test_heads_that_are_too_large_are_refused() -> None:
    with MetricsServer("127.0.0.1:0", families, bounds=Bounds(head_bytes=256)) as server:
        fits = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 150 + b"\r\n\r\n"
        assert asked(server.address, fits).startswith(b"HTTP/1.1 200 ")
        large = fits.replace(b"X: ", b"X: " + b"x" * 256)
        with contextlib.suppress(ConnectionError):
            assert asked(server.address, large).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9100", "localhost.evil", "[::1", ""]
)
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/"])
def test_foreign_names_are_refused(host: str, path: str) -> None:
    """A page of another site makes its own name point here: DNS rebinding."""
    with MetricsServer("127.0.0.1:0", families) as server:
        answer = asked(server.address, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 421 ")
        assert b"worker_version" not in answer


def test_our_own_names_are_not(certs: Path) -> None:
    ours = ["localhost:9100", "127.0.0.1", "[::1]:80", "10.0.0.7:9100", socket.gethostname()]
    with MetricsServer("127.0.0.1:0", families) as server:
        for host in ours:
            assert b"worker_version" in scrape(server.address, None, host)
    security = Security.from_options(Role.WORKER, certs)
    with MetricsServer("0.0.0.0:0", families, security) as server:
        # With a certificate there is no browser to lead astray, and services have names.
        for host in [*ours, server_name(JOB, Role.WORKER), "shard-0:9100", "pod.namespace.svc"]:
            assert b"worker_version" in scrape(server.address, certs, host)


def test_it_is_read_with_get_and_head() -> None:
    with MetricsServer("127.0.0.1:0", families) as server:
        head = asked(server.address, b"HEAD /metrics HTTP/1.0\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert head.endswith(b"\r\n\r\n")
        for method in (b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE"):
            answer = asked(server.address, method + b" /metrics HTTP/1.0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 405 ")
            assert b"\r\nAllow: GET, HEAD\r\n" in answer
        assert asked(server.address, b"GET /x HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"get / HTTP/1.0\r\n\r\n",
        b"GET http://x/ HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/1.0\r\n folded\r\n\r\n",
        b"GET / HTTP/1.0\r\nHost : a\r\n\r\n",
        b"GET / HTTP/1.0\r\nHost: a\nX: b\r\n\r\n",
        b"GET /\x00 HTTP/1.0\r\n\r\n",
    ],
)
def test_heads_that_are_none(head: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_head(head)
    assert caught.value.status == 400


def test_a_head_says_what_is_asked_for() -> None:
    found = parse_head(b"GET /metrics?name=x HTTP/1.1\r\nhOsT:\t a:1 \r\nAccept: b\r\n\r\n")
    assert (found.method, found.path, found.host, found.accept) == ("GET", "/metrics", "a:1", "b")


def test_the_connection_that_gives_way() -> None:
    seats = Seats(most=3, most_of_one=2)
    assert [seats.take(1, "a"), seats.take(2, "b"), seats.take(3, "b")] == [None, None, None]
    # All of them, and the oldest has asked.
    seats.asked(1)
    assert seats.take(4, "c") == 2
    # An address that has as many as it may loses its own.
    assert seats.take(5, "b") == 3
    for one in (1, 4, 5):
        seats.asked(one)
    assert seats.take(6, "d") == 1
    seats.leave(1)
    seats.asked(1)
    seats.leave(4)
    assert seats.take(7, "e") is None
    assert len(seats) == 3
