"""The port of a shard at which data connections come in, each for a call that waits for it."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pserver.data_connection import SECRET_BYTES, DataConnection, proof
from psrpc.channel import format_address
from psrpc.errors import PortInUse
from psrpc.logs import get_logger

log = get_logger()

MAX_STRANGERS = 64
"""Connections that have not shown a secret yet. One more costs the oldest its place: who is
expected needs some milliseconds, and the standing call carries everything if that was too long."""

STRANGER_S = 10.0
"""How long one has to show it, TLS included."""

PAUSE_S = 0.1
"""Before the next try, when the system has no descriptor for one more connection."""


@dataclass
class Expected:
    """A secret, and the connection on which it was shown; made by :meth:`DataListener.expect`.

    Attributes:
        secret: for whoever connects.
        port: to connect to.
    """

    secret: bytes
    port: int
    _forget: Callable[[bytes], socket.socket | None]

    def take(self, peer: str) -> DataConnection | None:
        """The connection, if somebody has shown the secret; call it once."""
        found = self._forget(self.secret)
        return None if found is None else DataConnection(found, peer)

    def forget(self) -> None:
        """Nobody is expected any more."""
        found = self._forget(self.secret)
        if found is not None:
            found.close()


@dataclass(eq=False)
class _Stranger:
    """A connection whose secret has not come yet."""

    connected: socket.socket
    deadline: float
    shaking_hands: bool
    shown: bytearray = field(default_factory=bytearray)


class DataListener:
    """Accepts from ``start`` to ``stop``, and nobody while no secret is outstanding. Thread-safe.

    One thread of its own asks for secrets, for all strangers at once, and never waits for one.
    """

    def __init__(
        self, host: str, port: int, context: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        """Args:
        host: to listen on.
        port: 0 lets the system choose.
        context: of TLS, asked for at each connection; None for plaintext.
        """
        self._host = host
        self._port = port
        self._context = context
        self._lock = threading.Lock()
        self._expected: dict[bytes, socket.socket | None] = {}
        """Digest of each outstanding secret, and the connection that has shown it."""
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
            unclaimed = [found for found in self._expected.values() if found is not None]
            self._expected.clear()
        for found in unclaimed:
            found.close()

    def expect(self) -> Expected:
        """A new secret, good for one connection."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with self._lock:
            self._expected[_digest(secret)] = None
        return Expected(secret, self.port, self._forget)

    def _forget(self, secret: bytes) -> socket.socket | None:
        with self._lock:
            return self._expected.pop(_digest(secret), None)

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
            awaited = any(found is None for found in self._expected.values())
        if not awaited:
            connected.close()
            return
        connected.setblocking(False)
        if self._context is not None:
            try:
                connected = self._context().wrap_socket(
                    connected, server_side=True, do_handshake_on_connect=False
                )
            except OSError:
                connected.close()
                return
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(self._strangers[0])
        stranger = _Stranger(
            connected, time.monotonic() + STRANGER_S, shaking_hands=self._context is not None
        )
        self._strangers.append(stranger)
        self._selector.register(connected, selectors.EVENT_READ, stranger)
        self._hear(stranger)

    def _hear(self, stranger: _Stranger) -> None:
        """Goes on with a stranger as far as one can without waiting."""
        connected = stranger.connected
        try:
            if stranger.shaking_hands:
                assert isinstance(connected, ssl.SSLSocket)
                connected.do_handshake()
                stranger.shaking_hands = False
            while len(stranger.shown) < SECRET_BYTES:
                more = connected.recv(SECRET_BYTES - len(stranger.shown))
                if not more:
                    self._drop(stranger)
                    return
                stranger.shown += more
            self._judge(stranger)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except ssl.SSLWantWriteError:
            # A handshake fits what the system holds for a connection that is new.
            self._drop(stranger)
        except OSError:
            self._drop(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        """Hands a connection on whose secret is known, and drops any other."""
        secret, connected = bytes(stranger.shown), stranger.connected
        digest = _digest(secret)
        self._selector.unregister(connected)
        self._strangers.remove(stranger)
        connected.setblocking(True)
        with self._lock:
            good = self._expected.get(digest, connected) is None
            if good:
                self._expected[digest] = connected
        if not good:
            connected.close()
            return
        # Last: the worker may name the connection as soon as it has seen the proof.
        with contextlib.suppress(OSError):
            connected.sendall(proof(secret))

    def _drop(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connected)
        self._strangers.remove(stranger)
        stranger.connected.close()


def _digest(secret: bytes) -> bytes:
    """By which a secret is looked up: how long that takes tells nothing about the secret."""
    return hashlib.sha256(secret).digest()
