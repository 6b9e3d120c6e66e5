"""Links do what they are told, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.chaos.proxy import Link, Proxy

WAIT_S = 20


class Echo:
    """Answers every connection with what comes in, in capitals."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.got = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                one, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[one], daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        with one:
            try:
                while data := one.recv(1 << 16):
                    self.got.release()
                    one.sendall(data.upper())
            except OSError:
                return


@pytest.fixture
def parts() -> Iterator[tuple[Proxy, Link, Echo, socket.socket]]:
    echo = Echo()
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy())
        link = proxy.link(lambda: ("127.0.0.1", echo.listener.getsockname()[1]))
        stack.callback(echo.listener.close)
        stack.callback(lambda: echo.listener.shutdown(socket.SHUT_RDWR))
        yield proxy, link, echo, stack.enter_context(connect(link))


def connect(link: Link) -> socket.socket:
    host, port = link.address.split(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def test_bytes_pass_both_ways(parts: tuple[Proxy, Link, Echo, socket.socket]) -> None:
    _, link, _, one = parts
    data = b"a" * 300_000
    sender = threading.Thread(target=one.sendall, args=[data])
    sender.start()
    received = b""
    while len(received) < len(data):
        received += one.recv(len(data))
    sender.join()
    assert received == data.upper()
    assert link.counts.connections == 1


def test_an_end_passes(parts: tuple[Proxy, Link, Echo, socket.socket]) -> None:
    proxy, link, _, one = parts
    one.sendall(b"a")
    assert one.recv(1) == b"A"
    one.shutdown(socket.SHUT_WR)
    assert one.recv(1) == b""
    assert proxy.do(lambda: link.connections) == 0


def test_a_reset_reaches_the_client(parts: tuple[Proxy, Link, Echo, socket.socket]) -> None:
    proxy, link, _, one = parts
    one.sendall(b"a")
    assert one.recv(1) == b"A"
    proxy.do(link.reset)
    with pytest.raises(ConnectionResetError):
        one.recv(1)
    assert link.counts.reset == 1
    with connect(link) as another:
        another.sendall(b"b")
        assert another.recv(1) == b"B"


def test_swallowed_replies_were_caused(parts: tuple[Proxy, Link, Echo, socket.socket]) -> None:
    proxy, link, echo, one = parts
    one.sendall(b"a")
    assert one.recv(1) == b"A"
    assert echo.got.acquire(timeout=WAIT_S)
    proxy.do(link.swallow)
    one.sendall(b"b")
    assert echo.got.acquire(timeout=WAIT_S)  # the request had its effect
    while not link.counts.swallowed:
        proxy.do(lambda: None)
    proxy.do(link.spit)
    with pytest.raises(ConnectionResetError):
        one.recv(1)


def test_silence_holds_back_and_loses_nothing(
    parts: tuple[Proxy, Link, Echo, socket.socket],
) -> None:
    proxy, link, echo, one = parts
    one.sendall(b"a")
    assert one.recv(1) == b"A"
    assert echo.got.acquire(timeout=WAIT_S)
    proxy.do(link.silence)
    one.sendall(b"b")
    with connect(link) as another:
        another.sendall(b"c")
        while link.counts.held < 2:
            proxy.do(lambda: None)
        assert not echo.got.acquire(blocking=False)
        proxy.do(link.speak)
        assert one.recv(1) == b"B"
        assert another.recv(1) == b"C"


def test_an_end_is_not_heard_in_silence(parts: tuple[Proxy, Link, Echo, socket.socket]) -> None:
    proxy, link, _, _ = parts
    with connect(link) as another:
        another.sendall(b"c")
        assert another.recv(1) == b"C"
        proxy.do(link.silence)
        another.shutdown(socket.SHUT_WR)
        while not link.counts.held:
            proxy.do(lambda: None)
        another.setblocking(False)
        with pytest.raises(BlockingIOError):
            another.recv(1)
        another.settimeout(WAIT_S)
        proxy.do(link.speak)
        assert another.recv(1) == b""


def test_a_refusing_link_accepts_no_connection(
    parts: tuple[Proxy, Link, Echo, socket.socket],
) -> None:
    proxy, link, _, one = parts
    one.sendall(b"a")
    assert one.recv(1) == b"A"
    proxy.do(link.refuse)
    with pytest.raises(ConnectionResetError):
        one.recv(1)
    with pytest.raises(ConnectionError), connect(link) as another:
        another.recv(1)
    assert link.counts.refused == 1
    proxy.do(link.welcome)
    with connect(link) as another:
        another.sendall(b"b")
        assert another.recv(1) == b"B"


def test_faults_of_one_link_may_overlap(parts: tuple[Proxy, Link, Echo, socket.socket]) -> None:
    proxy, link, _, one = parts
    one.sendall(b"a")
    assert one.recv(1) == b"A"
    for begin in (link.silence, link.swallow, link.silence, link.speak):
        proxy.do(begin)
    one.sendall(b"b")
    while not link.counts.held:
        proxy.do(lambda: None)
    proxy.do(link.speak)
    while not link.counts.swallowed:
        proxy.do(lambda: None)
    proxy.do(link.spit)
    with pytest.raises(ConnectionResetError):
        one.recv(1)
