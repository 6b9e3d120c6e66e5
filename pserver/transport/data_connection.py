"""A TCP connection that carries the exchanges of one standing call; the call goes on beside it.
docs/design/0013-data-connection.md."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Sequence

from pserver.transport.buffers import Progress
from pserver.transport.byte_stream import ByteStream, PlainStream, SealedStream
from pserver.transport.data_keys import PROOF_BYTES, data_keys
from psrpc.core.errors import InvalidArgument, Unreachable
from psrpc.net.limits import MAX_MESSAGE_BYTES

_LENGTH_BYTES = 4
"""Before each message: its length, little-endian. Load-bearing."""


class DataConnection:
    """Messages, each with the tensors that it announces behind it, one exchange after another.

    One thread uses it, but for :meth:`hang_up` and :meth:`close`, which any thread may call.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        sealing: tuple[bytes, bytes] | None = None,
        *,
        limit_s: float | None = None,
    ) -> None:
        """Args:
        connected: blocking, without a timeout; it is closed with this object.
        peer: how errors call the other side.
        sealing: keys of what is sent and of what comes; None for plaintext.
        limit_s: what was announced has to come as :class:`pserver.transport.buffers.Progress`
        demands, with
            this limit; None if it may take any time.
        """
        self._limit_s = limit_s
        self._socket = connected
        near = within_host(connected)
        self._stream: ByteStream = (
            PlainStream(connected, near=near, limit_s=limit_s)
            if sealing is None
            else SealedStream(connected, *sealing, near=near, limit_s=limit_s)
        )
        self._peer = peer
        # Held by who sends or receives, and by who ends or closes the socket: its number must not
        # be another file's by then.
        self._use, self._end = threading.Lock(), threading.Lock()
        prepare(connected, near=near)

    def send(self, message: bytes, parts: Sequence[memoryview]) -> None:
        """Sends a message and the bytes that it announces: contiguous, one part after another.

        Raises:
            Unreachable: the connection has ended.
        """
        head = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        views = [memoryview(head), *(part.cast("B") for part in parts if part.nbytes)]
        try:
            with self._use:
                self._stream.send(views)
        except OSError as error:
            raise self._ended(error) from None

    def receive_message(self) -> bytes | None:
        """The next message; None when the other side has ended the connection instead.

        Raises:
            InvalidArgument: it is longer than any can be.
            Stalled: it has begun, and stopped coming.
            Unreachable: the connection has ended within it.
        """
        head = bytearray(_LENGTH_BYTES)
        if not self._fill(memoryview(head), None):
            return None
        nbytes = int.from_bytes(head, "little")
        if nbytes > MAX_MESSAGE_BYTES:
            raise InvalidArgument(
                f"{self._peer} announces a message of {nbytes} bytes; expected at most "
                f"{MAX_MESSAGE_BYTES}"
            )
        message = bytearray(nbytes)
        self.receive_into(memoryview(message))
        return bytes(message)

    def receive_into(self, view: memoryview) -> None:
        """Fills ``view``, of bytes.

        Raises:
            Stalled: it stopped coming.
            Unreachable: the connection has ended before.
        """
        limit_s = self._limit_s
        progress = None if limit_s is None else Progress(time.monotonic(), limit_s)
        if view.nbytes and not self._fill(view, progress):
            raise self._ended()

    def hang_up(self) -> None:
        """Ends it for both sides: whoever waits, here or there, waits no more. May be repeated."""
        with self._end, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it, and lets go of the socket as soon as nobody uses it any more."""
        self.hang_up()
        with self._use, self._end:
            self._socket.close()

    def _fill(self, view: memoryview, progress: Progress | None) -> bool:
        """False if the connection ended before the first byte."""
        try:
            with self._use:
                count = self._stream.fill(view, progress)
        except OSError as error:
            raise self._ended(error) from None
        if 0 < count < len(view):
            raise self._ended()
        return count > 0

    def _ended(self, error: OSError | None = None) -> Unreachable:
        why = "it was closed" if error is None else error.strerror or str(error)
        return Unreachable(f"the data connection with {self._peer} broke: {why}")


def prepare(connected: socket.socket, *, near: bool) -> None:
    """Sets what both sides need."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What lies between may forget a connection on which nothing happens. Whether the peer lives is
    # found out by the call.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20)
    if near and hasattr(socket, "TCP_CONGESTION"):
        # Nothing is lost there and nobody to be fair to. What a host has set for its networks may
        # keep a pace (BBR), which costs a seventh of the time of an exchange of 64 MB.
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def within_host(connected: socket.socket) -> bool:
    """Whether both ends have one address; False where that is not known."""
    with contextlib.suppress(OSError):
        here, there = connected.getsockname(), connected.getpeername()
        return len(here) > 1 and bool(here[0] == there[0])
    return False


def connect(
    host: str, port: int, secret: bytes, peer: str, timeout_s: float, *, sealed: bool
) -> DataConnection:
    """The worker's side: connects, and shows that it was given the secret.

    Args:
        sealed: where calls are encrypted, for then nobody else knows the secret.

    Raises:
        Unreachable: nobody there, or not the shard that made the secret.
    """
    keys = data_keys(secret)
    opened: socket.socket | None = None
    try:
        opened = socket.create_connection((host, port), timeout_s)
        opened.sendall(keys.ticket)
        answer = b""
        while len(answer) < PROOF_BYTES and (more := opened.recv(PROOF_BYTES - len(answer))):
            answer += more
        if not hmac.compare_digest(answer, keys.proof):
            raise Unreachable(f"port {port} of {host} is not the data port of {peer}")
        opened.settimeout(None)
        return DataConnection(opened, peer, keys.of_worker if sealed else None)
    except (OSError, Unreachable) as error:
        if opened is not None:
            opened.close()
        if isinstance(error, Unreachable):
            raise
        raise Unreachable(
            f"no data connection to port {port} of {host}: {error.strerror or error}"
        ) from None
