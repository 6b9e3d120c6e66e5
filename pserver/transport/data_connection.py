"""A TCP connection that carries the exchanges of one standing call in place of its gRPC stream; see
docs/design/0013-data-connection.md."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Sequence

from pserver.transport.byte_stream import ByteStream, PlainStream, SealedStream
from pserver.transport.data_keys import PROOF_BYTES, data_keys
from pserver.transport.progress import TransferProgress
from psrpc.core.errors import InvalidArgument, Unreachable
from psrpc.net.limits import MAX_MESSAGE_BYTES

_LENGTH_BYTES = 4
"""Size of the length, little-endian, before each message. Load-bearing."""


class DataConnection:
    """Carries messages, each followed by the tensors that it announces. One thread uses it; any
    thread may call :meth:`hang_up` and :meth:`close`."""

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        sealing: tuple[bytes, bytes] | None = None,
        *,
        limit_s: float | None = None,
    ) -> None:
        """Args:
        connected: blocking, without a timeout; closed with this object.
        peer: name of the other side in errors.
        sealing: keys for sending and for receiving; None for plaintext.
        limit_s: announced bytes have to arrive as
        :class:`pserver.transport.progress.TransferProgress`
            demands, with this limit; None if they may take any time.
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
        # Threads that send or receive hold _use; threads that shut the socket down hold _end.
        # close() takes both: once it has closed the descriptor, the system may give its number to
        # another file, which no thread may then use by mistake.
        self._use, self._end = threading.Lock(), threading.Lock()
        prepare(connected, near=near)

    def send(self, message: bytes, parts: Sequence[memoryview]) -> None:
        """Sends a message and the contiguous parts that it announces.

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
        """Returns the next message; None if the peer has ended the connection.

        Raises:
            InvalidArgument: the message is longer than any message may be.
            Stalled: the message stopped coming halfway.
            Unreachable: the connection ended halfway.
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
        """Fills ``view``, whose items are bytes.

        Raises:
            Stalled: the bytes stopped coming.
            Unreachable: the connection ended too soon.
        """
        limit_s = self._limit_s
        progress = None if limit_s is None else TransferProgress(time.monotonic(), limit_s)
        if view.nbytes and not self._fill(view, progress):
            raise self._ended()

    def hang_up(self) -> None:
        """Ends the connection, and the waits of both sides for it. May be repeated."""
        with self._end, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection, and closes the socket as soon as no thread uses it."""
        self.hang_up()
        with self._use, self._end:
            self._socket.close()

    def _fill(self, view: memoryview, progress: TransferProgress | None) -> bool:
        """Fills ``view``; False if the connection ended before the first byte."""
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
    """Sets the socket options of both sides."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Keeps devices between the hosts from dropping an idle connection. The gRPC call, not this,
    # detects whether the peer is alive.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20)
    if near and hasattr(socket, "TCP_CONGESTION"):
        # Within a host no packet is lost and no bandwidth is shared. The host's default for its
        # networks may pace packets (BBR), which costs a seventh of the time of an exchange of 64
        # MB.
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def within_host(connected: socket.socket) -> bool:
    """Whether both ends have one address; False if that is unknown."""
    with contextlib.suppress(OSError):
        here, there = connected.getsockname(), connected.getpeername()
        return len(here) > 1 and bool(here[0] == there[0])
    return False


def connect(
    host: str, port: int, secret: bytes, peer: str, timeout_s: float, *, sealed: bool
) -> DataConnection:
    """Connects to a shard as a worker, and shows the shard the ticket of ``secret``.

    Args:
        sealed: whether to encrypt; only if calls are encrypted, since otherwise third parties know
            the secret.

    Raises:
        Unreachable: nothing listens there, or the listener is not the shard that made the secret.
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
