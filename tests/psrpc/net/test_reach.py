"""Faults on the way to a server, told apart on real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from coordinator.certificates.authority import make_certificates
from psrpc.net.channel import bind, make_server
from psrpc.net.reach import reach, why_unreachable
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role

SHORT_S = 0.1
"""For peers that never answer."""


@dataclass
class Servers:
    certs: Path
    plaintext: str
    encrypted: str
    expired: str

    def worker(self, certs: str) -> Security:
        # Not from_options: it refuses what is tried here before anything is sent.
        return Security(Role.WORKER, self.certs / certs)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    certs = tmp_path_factory.mktemp("certs")
    now = datetime.now(UTC)
    make_certificates(certs / "one", "one", now)
    make_certificates(certs / "again", "one", now)
    make_certificates(certs / "old", "one", now - timedelta(days=400))
    with contextlib.ExitStack() as stack:

        def serve(security: Security, old: grpc.ServerCredentials | None = None) -> str:
            server = make_server(2, security=security)
            stack.callback(lambda: server.stop(None).wait())
            if old is None:
                port = bind(server, "127.0.0.1:0", security)
            else:
                port = server.add_secure_port("127.0.0.1:0", old)
            server.start()
            return f"127.0.0.1:{port}"

        pair = [
            (certs / "old" / name).read_bytes() for name in ("coordinator.key", "coordinator.crt")
        ]
        yield Servers(
            certs,
            serve(PLAINTEXT),
            serve(Security.from_options(Role.COORDINATOR, certs / "one")),
            serve(PLAINTEXT, grpc.ssl_server_credentials([(pair[0], pair[1])])),
        )


def code(address: str, security: Security, timeout_s: float = 5.0) -> str:
    error = why_unreachable(address, security, Role.COORDINATOR, timeout_s)
    return error.code if error else ""


def test_the_way_is_clear(servers: Servers) -> None:
    assert code(servers.plaintext, PLAINTEXT) == ""
    steps = list(reach(servers.encrypted, servers.worker("one"), Role.COORDINATOR))
    assert [step.name for step in steps] == ["name", "TCP", "TLS"]
    assert not [step.error for step in steps if step.error]


def test_one_end_wants_tls(servers: Servers) -> None:
    assert code(servers.encrypted, PLAINTEXT) == "PS331"
    assert code(servers.plaintext, servers.worker("one")) == "PS332"


def test_certificates_that_do_not_fit(servers: Servers) -> None:
    assert code(servers.encrypted, servers.worker("again")) == "PS333"
    assert code(servers.expired, Security(certs=servers.certs / "old")) == "PS335"
    error = why_unreachable(servers.encrypted, servers.worker("one"), Role.SHARD)
    assert error is not None
    assert error.code == "PS336"


def test_a_certificate_that_the_server_refuses(servers: Servers, tmp_path: Path) -> None:
    """It is found out only after the handshake, when the server hangs up."""
    for path in (servers.certs / "again").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / path.name).chmod(0o600)
    own = (servers.certs / "one" / "ca.crt").read_bytes()
    (tmp_path / "ca.crt").write_bytes(own + (tmp_path / "ca.crt").read_bytes())
    assert code(servers.encrypted, Security(Role.WORKER, tmp_path)) == "PS334"


def test_a_token_where_certificates_are_wanted(servers: Servers) -> None:
    security = Security(Role.OPERATOR, servers.certs / "one", servers.certs / "token")
    error = why_unreachable(servers.encrypted, security, Role.COORDINATOR)
    assert error is not None
    assert (error.code, "leave --token-file out" in str(error)) == ("PS334", True)


def test_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert code(f"127.0.0.1:{unused.getsockname()[1]}", PLAINTEXT) == "PS204"


def test_an_unknown_host_name() -> None:
    for name in ("no-such-machine.invalid", "no..such", "n" * 64):
        assert code(f"{name}:5000", PLAINTEXT) == "PS207"


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def ask(*_: object, flags: int, **__: object) -> list[bool]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror
        return [answer.wait(60)]

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    assert code("machine:5000", PLAINTEXT, SHORT_S) == "PS207"
    answer.set()


def test_packets_are_dropped() -> None:
    """A queue of connections that is full drops further ones without a word."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = full.getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        assert code(f"127.0.0.1:{port}", PLAINTEXT, SHORT_S) == "PS209"


def test_a_silent_server(servers: Servers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert code(address, PLAINTEXT, SHORT_S) == "PS213"
        assert code(address, servers.worker("one"), SHORT_S) == "PS213"


def test_something_else(servers: Servers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:
        answering = threading.Thread(target=_answer, args=(web, 4))
        answering.start()
        address = f"127.0.0.1:{web.getsockname()[1]}"
        error = why_unreachable(address, PLAINTEXT, Role.COORDINATOR)
        assert error is not None
        assert (error.code, "(it says 'HTTP/1.1 ')" in str(error)) == ("PS212", True)
        assert code(address, servers.worker("one")) == "PS212"
        answering.join()


def _answer(web: socket.socket, times: int) -> None:
    for _ in range(times):
        client, _ = web.accept()
        with client:
            client.recv(1024)
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_peer_that_hangs_up_may_be_a_proxy_of_a_server_that_returns(servers: Servers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    proxy.accept()[0].close()

        closing = threading.Thread(target=hang_up)
        closing.start()
        address = f"127.0.0.1:{proxy.getsockname()[1]}"
        for security in (PLAINTEXT, servers.worker("one")):
            error = why_unreachable(address, security, Role.COORDINATOR)
            assert error is not None
            assert (error.code, error.retryable) == ("PS213", True)
        proxy.shutdown(socket.SHUT_RDWR)
        closing.join()
