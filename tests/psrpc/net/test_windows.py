"""Bound on the unread bytes that a connection can bring into a server: counted in frames of HTTP/2,
which a client of gRPC does not show."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import grpc
import pytest

from psrpc.net.channel import bind, make_server
from psrpc.net.limits import MAX_STREAMS, WINDOW_BYTES
from psrpc.wire.interceptor import ErrorInterceptor

LONG_S = 30.0
ACK, END_HEADERS = 1, 4
MOST_STREAMS, INITIAL_WINDOW = 3, 4
FRAME = 1 << 14


class Kind(IntEnum):
    """Of frames (RFC 9113, section 6)."""

    DATA = 0
    HEADERS = 1
    SETTINGS = 4
    PING = 6
    WINDOW_UPDATE = 8


class Peer:
    """Begins one call and sends as much of a message as it may."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=LONG_S)
        self._file = self._socket.makefile("rb")
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._due = 0
        self._send(Kind.SETTINGS)
        self.settings: dict[int, int] = {}
        self.sent = 0
        self._stream = 0
        self._connection = (1 << 16) - 1

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def begin(self, path: str, nbytes: int) -> None:
        """A call with a message of so many bytes, none of which are sent."""
        names = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "t"}
        names |= {"content-type": "application/grpc", "te": "trailers"}
        block = b"".join(
            b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in pair)
            for pair in names.items()
        )
        self._send(Kind.HEADERS, block, END_HEADERS, 1)
        self._data(struct.pack(">BI", 0, nbytes))

    def fill(self) -> None:
        """Sends what the windows allow, which grow when the server says so."""
        while room := min(self.window, self._connection, FRAME):
            self._data(bytes(room))

    def round_trip(self) -> None:
        """Reads what the server has sent until it has taken all that was sent before."""
        # Not with a PING: of those a server takes few.
        self._send(Kind.SETTINGS)
        while True:
            kind, flags, stream, payload = self._frame()
            match kind, flags & ACK:
                case Kind.SETTINGS, 0:
                    found = struct.iter_unpack(">HI", payload)
                    self.settings.update(dict(found))
                    self._send(Kind.SETTINGS, b"", ACK)
                case Kind.SETTINGS, 1:
                    self._due -= 1
                    if not self._due:
                        return
                case Kind.PING, 0:
                    self._send(Kind.PING, payload, ACK)
                case Kind.WINDOW_UPDATE, _:
                    more = struct.unpack(">I", payload)[0]
                    if stream:
                        self._stream += more
                    else:
                        self._connection += more

    @property
    def window(self) -> int:
        """The window that the stream has left."""
        return self.settings.get(INITIAL_WINDOW, (1 << 16) - 1) + self._stream - self.sent

    def _data(self, payload: bytes) -> None:
        self._send(Kind.DATA, payload, 0, 1)
        self.sent += len(payload)
        self._connection -= len(payload)

    def _send(self, kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> None:
        self._due += (kind, flags) == (Kind.SETTINGS, 0)
        length = struct.pack(">I", len(payload))[1:]
        self._socket.sendall(length + struct.pack(">BBI", kind, flags, stream) + payload)

    def _frame(self) -> tuple[int, int, int, bytes]:
        length, kind, flags, stream = struct.unpack(">IBBI", b"\0" + self._file.read(9))
        return kind, flags, stream, self._file.read(length)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that reads ``/t/Read`` and never ``/t/Leave``."""
    over = threading.Event()

    def leave(_requests: Any, _context: Any) -> bytes:
        assert over.wait(LONG_S)
        return b""

    def read(requests: Any, _context: Any) -> bytes:
        return b"".join(requests)

    server = make_server(2, [ErrorInterceptor()])
    methods = {
        name: grpc.stream_unary_rpc_method_handler(behaviour)
        for name, behaviour in (("Leave", leave), ("Read", read))
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", methods),))
    found = bind(server, "127.0.0.1:0")
    server.start()
    yield found
    over.set()
    server.stop(0).wait()


@pytest.fixture
def peer(port: int) -> Iterator[Peer]:
    found = Peer(port)
    found.round_trip()
    yield found
    found.close()


def test_the_bound_on_bytes_of_a_connection(peer: Peer) -> None:
    assert peer.settings[INITIAL_WINDOW] == WINDOW_BYTES
    assert peer.settings[MOST_STREAMS] == MAX_STREAMS


def test_an_unread_message_stays_with_its_sender(peer: Peer) -> None:
    """However often the sender is as fast as it can be: the window does not grow."""
    peer.begin("/t/Leave", 8 << 20)
    for _ in range(30):
        peer.fill()
        peer.round_trip()
    assert peer.sent == WINDOW_BYTES


def test_a_message_that_is_read_comes_whole(peer: Peer) -> None:
    nbytes = 2 << 20
    peer.begin("/t/Read", nbytes)
    while peer.sent < nbytes:
        peer.fill()
        peer.round_trip()
