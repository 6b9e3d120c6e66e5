"""The port of a shard at which data connections come in, each for a call that waits for it."""

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
"""Connections that have not shown a ticket yet. One more costs the oldest its place: who is
expected needs some milliseconds, and the standing call carries everything if that was too long."""

STRANGER_S = 10.0
"""How long one has to show it."""

PAUSE_S = 0.1
"""Before the next try, when the system has no descriptor for one more connection."""


@dataclass
class Expected:
    """A secret, and the connection on which its ticket was shown; made by
    :meth:`DataListener.expect`.

    Attributes:
        secret: for whoever connects.
        port: to connect to.
        sealed: whether what comes and goes there is.
    """

    secret: bytes = field(repr=False)
    port: int
    sealed: bool
    _keys: DataKeys
    _forget: Callable[[DataKeys], socket.socket | None]

    def take(self, peer: str) -> DataConnection | None:
        """The connection, if there is one; call it once."""
        found = self._forget(self._keys)
        if found is None:
            return None
        sealing = self._keys.of_shard if self.sealed else None
        return DataConnection(found, peer, sealing, limit_s=PROGRESS_S)

    def forget(self) -> None:
        """Nobody is expected any more."""
        found = self._forget(self._keys)
        if found is not None:
            found.close()


@dataclass(eq=False)
class _Stranger:
    """A connection whose ticket has not come yet."""

    connected: socket.socket
    deadline: float
    shown: bytearray = field(default_factory=bytearray)


@dataclass
class _Awaited:
    proof: bytes
    connected: socket.socket | None = None
    """Which has shown the ticket."""


class DataListener:
    """Accepts from ``start`` to ``stop``, and nobody while none is expected. Thread-safe.

    One thread of its own asks for tickets, of all strangers at once, and never waits for one.
    """

    def __init__(self, host: str, port: int, *, sealed: bool = False) -> None:
        """Args:
        host: to listen on.
        port: 0 lets the system choose.
        sealed: whether calls are encrypted; then so is what goes over these connections.
        """
        self._host = host
        self._port = port
        self._sealed = sealed
        self._lock = threading.Lock()
        self._expected: dict[bytes, _Awaited] = {}
        """By the digest of each ticket that is outstanding."""
        self._strangers: list[_Stranger] = []
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self.port = 0

    def start(self) -> int:
        """Listens; returns the port.

        Raises:
            PortInUse: it cannot be had.
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
        """Accepts no more; connections that were taken stay."""
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
        for found in unclaimed:
            if found is not None:
                found.close()

    def expect(self) -> Expected:
        """A new secret, good for one connection."""
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
                # Another of the same round may have cost it its place.
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
        """Goes on with a stranger as far as one can without waiting."""
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
        """Hands a connection on whose ticket is known, and drops any other."""
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
        # Last: the worker may name the connection as soon as it has seen the proof.
        with contextlib.suppress(OSError):
            connected.sendall(awaited.proof)

    def _drop(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connected)
        self._strangers.remove(stranger)
        stranger.connected.close()


def _digest(ticket: bytes) -> bytes:
    """By which a ticket is looked up: how long that takes tells nothing about the ticket."""
    return hashlib.sha256(ticket).digest()
