"""The byte stream of a data connection: plain, or sealed in records."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pserver.transport.data_keys import following_key
from pserver.transport.progress import TransferProgress

RECORD_BYTES = 1 << 20
"""Maximum plaintext per record. TLS allows 2^14 bytes, and Python's ``ssl`` makes a system call and
takes the interpreter lock for each record, which took twice as long. Load-bearing, as is the form
of a record: four bytes of length, little-endian and authenticated, then the ciphertext and the
tag."""

RECORDS_PER_KEY = 1 << 18
"""Number of records after which the key changes. A key then seals at most 2^34 blocks, the limit of
RFC 8446, section 5.5, for AES-GCM."""

_LENGTH_BYTES = 4
_NONCE_BYTES = 12
_TAG_BYTES = 16

_SHORT_BYTES = 1 << 17
"""Pieces up to this length are joined before sealing."""

_PIECE_BYTES = 1 << 18
"""Maximum bytes received per system call. Smaller pieces cause more wake-ups and more contention
for the interpreter lock. With larger ones the kernel collects so much data that it has left the CPU
cache before it is copied. 16 MB within a host took 5.1 ms in one piece, 4.1 ms in pieces of this
size."""

_NEAR_PIECE_BYTES = 1 << 20
"""Maximum bytes received per system call within a host, where the kernel wakes the receiver only
when the whole piece has arrived. Otherwise it would wake the receiver for each 64 KB, which delays
the sender as well: 16 MB took 4.6 ms, and take 3.6 ms with this. Not used between hosts: there the
kernel would size its receive window by this, and with a round trip of 40 ms the first 8 MB took
twice as long."""

_VIEWS = 512
"""Maximum views per system call; the limit of Linux is 1,024."""


class ByteStream(Protocol):
    """Sends and receives bytes. One thread may use it at a time."""

    def send(self, views: list[memoryview]) -> None:
        """Sends contiguous bytes, one view after another. May change the list. Raises OSError."""

    def fill(self, view: memoryview, progress: TransferProgress | None = None) -> int:
        """Receives into ``view``; returns the number of bytes received, which is less than its
        length only if the peer ended the stream.

        Args:
            progress: the minimum pace; without it, receiving may take any time.

        Raises:
            OSError: the connection broke, or a third party changed the bytes.
            Stalled: the bytes come too slowly.
        """


class PlainStream:
    """See :class:`ByteStream`."""

    def __init__(
        self, connected: socket.socket, *, near: bool = False, limit_s: float | None = None
    ) -> None:
        """Args:
        connected: blocking, without a timeout.
        near: both ends are on this host.
        limit_s: longest wait for bytes between two checks of ``progress``; None for no limit.
        """
        self._socket = connected
        self._near = near
        self._piece = _NEAR_PIECE_BYTES if near else _PIECE_BYTES
        if limit_s is not None:
            # Sets the kernel's timeout, because Python's would make the socket non-blocking.
            seconds, rest = divmod(limit_s, 1)
            timeout = struct.pack("@ll", int(seconds), int(rest * 1e6))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._arrivals = select.poll()
        self._arrivals.register(connected, select.POLLIN)
        self._least = 1
        """Bytes that have to arrive before the kernel wakes the receiver."""

    def send(self, views: list[memoryview]) -> None:
        """See :class:`ByteStream`."""
        while views:
            sent = self._socket.sendmsg(views[:_VIEWS])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def fill(self, view: memoryview, progress: TransferProgress | None = None) -> int:
        """See :class:`ByteStream`."""
        place = 0
        while place < len(view):
            left_s = None if progress is None else progress.left_s(time.monotonic())
            try:
                count = self._receive(view[place : place + self._piece], left_s)
            except BlockingIOError:
                continue
            if not count:
                break
            place += count
            if progress is not None:
                progress.received(count, time.monotonic())
        return place

    def _receive(self, view: memoryview, left_s: float | None) -> int:
        """Receives the first bytes of ``view``; 0 at the end. Raises BlockingIOError after a while
        without bytes."""
        if not self._near or len(view) <= _SHORT_BYTES:
            self._wake_at(1)
            return self._socket.recv_into(view, 0, socket.MSG_WAITALL)
        self._wake_at(len(view))
        # Waits in poll, not in recv: recv takes the bytes that are there and then waits again for
        # the same number, which may never arrive.
        self._arrivals.poll(None if left_s is None else left_s * 1000 + 1)
        return self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)

    def _wake_at(self, nbytes: int) -> None:
        if nbytes != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._least = nbytes


class SealedStream:
    """Sends and receives encrypted records, see :class:`ByteStream`. Seals each record by
    AES-256-GCM with its number as the nonce and a key per direction, so a third party cannot read,
    change, omit, repeat or reflect one."""

    def __init__(
        self,
        connected: socket.socket,
        sending: bytes,
        receiving: bytes,
        *,
        near: bool = False,
        limit_s: float | None = None,
    ) -> None:
        """Args:
        connected: blocking, without a timeout.
        sending: key for sent records, never used for anything else.
        receiving: key for received records.
        near, limit_s: see :class:`PlainStream`.
        """
        self._socket = connected
        self._raw = PlainStream(connected, near=near, limit_s=limit_s)
        self._sending, self._receiving = _Key(sending), _Key(receiving)
        longest = _LENGTH_BYTES + RECORD_BYTES + _TAG_BYTES
        # The kernel provides these pages on first use, so a short exchange costs little memory.
        self._sealed, self._received = _memory(longest), _memory(longest)
        self._joined, self._opened = _memory(RECORD_BYTES), _memory(RECORD_BYTES)
        self._rest = self._opened[:0]
        """Bytes of the last record not yet returned."""

    def send(self, views: list[memoryview]) -> None:
        """See :class:`ByteStream`."""
        joined = 0
        for view in views:
            if joined and (len(view) > _SHORT_BYTES or joined + len(view) > RECORD_BYTES):
                self._send_record(self._joined[:joined])
                joined = 0
            if len(view) <= _SHORT_BYTES:
                self._joined[joined : joined + len(view)] = view
                joined += len(view)
                continue
            for start in range(0, len(view), RECORD_BYTES):
                self._send_record(view[start : start + RECORD_BYTES])
        if joined:
            self._send_record(self._joined[:joined])

    def fill(self, view: memoryview, progress: TransferProgress | None = None) -> int:
        """See :class:`ByteStream`."""
        place = 0
        while place < len(view):
            if not self._rest:
                nbytes = self._receive_record(progress)
                if not nbytes:
                    break
                if nbytes <= len(view) - place:
                    self._open(nbytes, view[place : place + nbytes])
                    place += nbytes
                    continue
                self._rest = self._opened[:nbytes]
                self._open(nbytes, self._rest)
            count = min(len(self._rest), len(view) - place)
            view[place : place + count] = self._rest[:count]
            self._rest = self._rest[count:]
            place += count
        return place

    def _send_record(self, plaintext: memoryview) -> None:
        record = self._sealed[: _LENGTH_BYTES + len(plaintext) + _TAG_BYTES]
        record[:_LENGTH_BYTES] = len(plaintext).to_bytes(_LENGTH_BYTES, "little")
        cipher, nonce = self._sending.of_next_record()
        cipher.encrypt_into(nonce, plaintext, record[:_LENGTH_BYTES], record[_LENGTH_BYTES:])
        self._socket.sendall(record)

    def _receive_record(self, progress: TransferProgress | None) -> int:
        """Receives the next record into ``_received``. Returns the number of bytes of its
        plaintext, 0 at the end."""
        head = self._received[:_LENGTH_BYTES]
        count = self._raw.fill(head, progress)
        if not count:
            return 0
        nbytes = int.from_bytes(head, "little")
        if count < _LENGTH_BYTES or not 0 < nbytes <= RECORD_BYTES:
            raise ConnectionAbortedError("the received bytes are not a record")
        rest = self._received[_LENGTH_BYTES : _LENGTH_BYTES + nbytes + _TAG_BYTES]
        if self._raw.fill(rest, progress) < len(rest):
            raise ConnectionAbortedError("it was closed within a record")
        return nbytes

    def _open(self, nbytes: int, into: memoryview) -> None:
        sealed = self._received[: _LENGTH_BYTES + nbytes + _TAG_BYTES]
        cipher, nonce = self._receiving.of_next_record()
        try:
            cipher.decrypt_into(nonce, sealed[_LENGTH_BYTES:], sealed[:_LENGTH_BYTES], into)
        except InvalidTag:
            raise ConnectionAbortedError("a record is not authentic") from None


class _Key:
    """The key of one direction, and how often it was used."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._records = 0

    def of_next_record(self) -> tuple[AESGCM, bytes]:
        """Returns the cipher and a nonce that it has never used."""
        if self._records == RECORDS_PER_KEY:
            self._key = following_key(self._key)
            self._cipher = AESGCM(self._key)
            self._records = 0
        nonce = self._records.to_bytes(_NONCE_BYTES, "little")
        self._records += 1
        return self._cipher, nonce


def _memory(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data
