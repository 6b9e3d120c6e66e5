"""The port where a shard accepts data connections. Each belongs to a call that expects it."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pserver.transport.data_connection import DataConnection
from pserver.transport.data_keys import SECRET_BYTES, TICKET_BYTES, DataKeys, data_keys
from psrpc.core.errors import PortInUse
from psrpc.net.channel import format_address
from psrpc.net.limits import PROGRESS_S
from psrpc.ops.logs import get_logger

log = get_logger()

MAX_STRANGERS = 64
"""Maximum number of connections that have not shown a ticket yet; a new one displaces the oldest. A
worker shows its ticket within milliseconds. If its connection is displaced before, its call carries
the tensors instead."""

STRANGER_S = 10.0
"""How long a connection may take to show its ticket."""

PAUSE_S = 0.1
"""Pause before the next accept when the system has no free file descriptor."""


@dataclass
class Expected:
    """One expected connection; made by :meth:`DataListener.expect`.

    Attributes:
        secret: for the worker that will connect.
        port: the port to connect to.
        sealed: whether the connection is encrypted.
    """

    secret: bytes = field(repr=False)
    port: int
    sealed: bool
    _keys: DataKeys
    _forget: Callable[[DataKeys], socket.socket | None]

    def take(self, peer: str) -> DataConnection | None:
        """Returns the connection, or None if the worker has not connected. Call it once."""
        connected = self._forget(self._keys)
        if connected is None:
            return None
        sealing = self._keys.of_shard if self.sealed else None
        return DataConnection(connected, peer, sealing, limit_s=PROGRESS_S)

    def forget(self) -> None:
        """Stops expecting the connection, and closes it if the worker has connected."""
        connected = self._forget(self._keys)
        if connected is not None:
            connected.close()


@dataclass(eq=False)
class _Stranger:
    """A connection that has not shown its ticket yet."""

    connected: socket.socket
    deadline: float
    shown: bytearray = field(default_factory=bytearray)


@dataclass
class _Awaited:
    proof: bytes
    connected: socket.socket | None = None
    """The connection that has shown the ticket."""


class DataListener:
    """Accepts connections from ``start`` to ``stop``, but only while a call expects one.
    Thread-safe.

    A "stranger" is a connection that has not shown its ticket yet. A single thread reads the
    tickets of all strangers without blocking on any of them."""

    def __init__(self, host: str, port: int, *, sealed: bool = False) -> None:
        """Args:
        host: to listen on.
        port: 0 lets the system choose.
        sealed: whether gRPC calls are encrypted; then the data connections are, too.
        """
        self._host = host
        self._port = port
        self._sealed = sealed
        self._lock = threading.Lock()
        self._expected: dict[bytes, _Awaited] = {}
        """Digest of each outstanding ticket -> its connection."""
        self._strangers: list[_Stranger] = []
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self.port = 0

    def start(self) -> int:
        """Listens; returns the port.

        Raises:
            PortInUse: the port is not available.
        """
        self._listener = self._listen()
        self.port = self._listener.getsockname()[1]
        self._wake = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake[0], selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="data port", daemon=True)
        self._thread.start()
        return self.port

    def stop(self) -> None:
        """Stops accepting; connections that calls have taken stay open."""
        if self._thread is None or self._wake is None or self._listener is None:
            return
        self._wake[1].close()
        self._thread.join()
        self._thread = None
        self._selector.close()
        self._listener.close()
        self._wake[0].close()
        for stranger in self._strangers:
            stranger.connected.close()
        with self._lock:
            unclaimed = [awaited.connected for awaited in self._expected.values()]
            self._expected.clear()
        for connected in unclaimed:
            if connected is not None:
                connected.close()

    def expect(self) -> Expected:
        """Makes a secret, and accepts one connection that shows its ticket."""
        secret = secrets.token_bytes(SECRET_BYTES)
        keys = data_keys(secret)
        with self._lock:
            self._expected[_digest(keys.ticket)] = _Awaited(keys.proof)
        return Expected(secret, self.port, self._sealed, keys, self._forget)

    def _forget(self, keys: DataKeys) -> socket.socket | None:
        with self._lock:
            awaited = self._expected.pop(_digest(keys.ticket), None)
        return None if awaited is None else awaited.connected

    def _listen(self) -> socket.socket:
        where = format_address(self._host, self._port)
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, proto)
        except OSError as error:
            raise PortInUse(f"cannot listen on {where}: {error.strerror}; check --bind") from None
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(MAX_STRANGERS)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise PortInUse(
                f"cannot listen on {where} for data connections: {error.strerror}; choose another "
                "--data-connections"
            ) from None
        return listener

    def _run(self) -> None:
        assert self._wake is not None
        while True:
            now = time.monotonic()
            for stranger in [s for s in self._strangers if s.deadline <= now]:
                self._drop(stranger)
            timeout = min((s.deadline - now for s in self._strangers), default=None)
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._wake[0]:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                # An accept earlier in this loop may have displaced the stranger.
                elif key.data in self._strangers:
                    self._hear(key.data)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a data connection could not be accepted", why=error.strerror)
            time.sleep(PAUSE_S)
            return
        with self._lock:
            awaited = any(found.connected is None for found in self._expected.values())
        if not awaited:
            connected.close()
            return
        connected.setblocking(False)
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(self._strangers[0])
        stranger = _Stranger(connected, time.monotonic() + STRANGER_S)
        self._strangers.append(stranger)
        self._selector.register(connected, selectors.EVENT_READ, stranger)
        self._hear(stranger)

    def _hear(self, stranger: _Stranger) -> None:
        """Reads the bytes of a stranger's ticket that have arrived."""
        try:
            while len(stranger.shown) < TICKET_BYTES:
                more = stranger.connected.recv(TICKET_BYTES - len(stranger.shown))
                if not more:
                    self._drop(stranger)
                    return
                stranger.shown += more
            self._judge(stranger)
        except BlockingIOError:
            return
        except OSError:
            self._drop(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        """Hands a connection with a known ticket to its call, and closes any other."""
        connected = stranger.connected
        self._selector.unregister(connected)
        self._strangers.remove(stranger)
        connected.setblocking(True)
        with self._lock:
            awaited = self._expected.get(_digest(bytes(stranger.shown)))
            good = awaited is not None and awaited.connected is None
            if awaited is not None and good:
                awaited.connected = connected
        if awaited is None or not good:
            connected.close()
            return
        # Sends the proof last, since the worker may use the connection as soon as it has received
        # that.
        with contextlib.suppress(OSError):
            connected.sendall(awaited.proof)

    def _drop(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connected)
        self._strangers.remove(stranger)
        stranger.connected.close()


def _digest(ticket: bytes) -> bytes:
    """Returns the dict key of a ticket. It is a digest, so that the duration of a look-up reveals
    nothing about the ticket."""
    return hashlib.sha256(ticket).digest()
