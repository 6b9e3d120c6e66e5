"""The bytes of a data connection, in one order and in whole: as they are, or sealed in records."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pserver.transport.buffers import Progress
from pserver.transport.data_keys import following_key

RECORD_BYTES = 1 << 20
"""Of plaintext in one record, at most. TLS has 2^14, and Python's ``ssl`` a system call and a fight
for the interpreter's lock for each: it took twice as long. Load-bearing, as is all of a record: its
length as four bytes, little-endian, which are authenticated, the ciphertext, and the tag."""

RECORDS_PER_KEY = 1 << 18
"""A key seals 2^34 blocks at most, as many as RFC 8446, section 5.5, allows AES-GCM. Then another
one follows."""

_LENGTH_BYTES = 4
_NONCE_BYTES = 12
_TAG_BYTES = 16

_SHORT_BYTES = 1 << 17
"""Pieces of this length and shorter are joined, rather than sealed one by one."""

_PIECE_BYTES = 1 << 18
"""Received by one system call, at most. Of less there are more wakes and more fights for the
interpreter's lock; of more the kernel holds back so much that it leaves the cache before it is
copied. 16 MB within a host came in 5.1 ms at once, in 4.1 ms by pieces of this size."""

_NEAR_PIECE_BYTES = 1 << 20
"""Within a host, where who receives is woken when all of a piece is here. Every 64 KB wake it
otherwise, which costs the sender as much time: 16 MB came in 4.6 ms, in 3.6 with this. Between
hosts the kernel would open its window by it: over a round trip of 40 ms the first 8 MB took twice
as long."""

_VIEWS = 512
"""In one system call, at most; Linux takes 1,024."""


class ByteStream(Protocol):
    """One thread sends or receives at a time."""

    def send(self, views: list[memoryview]) -> None:
        """Sends contiguous bytes, one view after another. Raises OSError; spoils the list."""

    def fill(self, view: memoryview, progress: Progress | None = None) -> int:
        """Receives into ``view``; how many bytes came before the other side ended the stream.

        Args:
            progress: what comes has to satisfy it; without, it may take any time.

        Raises:
            OSError: the connection broke, or what came was changed on its way.
            Stalled: too little comes.
        """


class PlainStream:
    """See :class:`ByteStream`."""

    def __init__(
        self, connected: socket.socket, *, near: bool = False, limit_s: float | None = None
    ) -> None:
        """Args:
        connected: blocking, without a timeout.
        near: within this host.
        limit_s: how often at least a wait for bytes looks at its ``progress``; None: never.
        """
        self._socket = connected
        self._near = near
        self._piece = _NEAR_PIECE_BYTES if near else _PIECE_BYTES
        if limit_s is not None:
            # The kernel's own: Python's would make the socket one that does not block.
            seconds, rest = divmod(limit_s, 1)
            timeout = struct.pack("@ll", int(seconds), int(rest * 1e6))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._arrivals = select.poll()
        self._arrivals.register(connected, select.POLLIN)
        self._least = 1
        """How many bytes have to be here for whoever waits to be woken."""

    def send(self, views: list[memoryview]) -> None:
        """See :class:`ByteStream`."""
        while views:
            sent = self._socket.sendmsg(views[:_VIEWS])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def fill(self, view: memoryview, progress: Progress | None = None) -> int:
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
        """The first bytes of ``view``, if not all of them; 0 at the end. Raises BlockingIOError
        where nothing came for a while."""
        if not self._near or len(view) <= _SHORT_BYTES:
            self._wake_at(1)
            return self._socket.recv_into(view, 0, socket.MSG_WAITALL)
        self._wake_at(len(view))
        # To wait in recv would not do: it takes what is here and then waits for the same number
        # again, which may never come.
        self._arrivals.poll(None if left_s is None else left_s * 1000 + 1)
        return self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)

    def _wake_at(self, nbytes: int) -> None:
        if nbytes != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._least = nbytes


class SealedStream:
    """See :class:`ByteStream`. Every record is AES-256-GCM with its number as the nonce, and a key
    for each direction: none can be read, changed, left out, repeated or sent back."""

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
        sending: key of what is sent, used for nothing else ever.
        receiving: key of what comes.
        near, limit_s: see :class:`PlainStream`.
        """
        self._socket = connected
        self._raw = PlainStream(connected, near=near, limit_s=limit_s)
        self._sending, self._receiving = _Key(sending), _Key(receiving)
        longest = _LENGTH_BYTES + RECORD_BYTES + _TAG_BYTES
        # Not touched before they are needed, so that a short exchange costs little memory.
        self._sealed, self._received = _memory(longest), _memory(longest)
        self._joined, self._opened = _memory(RECORD_BYTES), _memory(RECORD_BYTES)
        self._rest = self._opened[:0]
        """Of the last record, what nobody has asked for yet."""

    def send(self, views: list[memoryview]) -> None:
        """See :class:`ByteStream`."""
        held = 0
        for view in views:
            if held and (len(view) > _SHORT_BYTES or held + len(view) > RECORD_BYTES):
                self._send_record(self._joined[:held])
                held = 0
            if len(view) <= _SHORT_BYTES:
                self._joined[held : held + len(view)] = view
                held += len(view)
                continue
            for start in range(0, len(view), RECORD_BYTES):
                self._send_record(view[start : start + RECORD_BYTES])
        if held:
            self._send_record(self._joined[:held])

    def fill(self, view: memoryview, progress: Progress | None = None) -> int:
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

    def _receive_record(self, progress: Progress | None) -> int:
        """Bytes of plaintext in the next record, which lies in ``_received``; 0 at the end."""
        head = self._received[:_LENGTH_BYTES]
        count = self._raw.fill(head, progress)
        if not count:
            return 0
        nbytes = int.from_bytes(head, "little")
        if count < _LENGTH_BYTES or not 0 < nbytes <= RECORD_BYTES:
            raise ConnectionAbortedError("what came is no record")
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
            raise ConnectionAbortedError("what came is not what was sent") from None


class _Key:
    """The key of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._records = 0

    def of_next_record(self) -> tuple[AESGCM, bytes]:
        """The cipher, and a nonce that it has never had."""
        if self._records == RECORDS_PER_KEY:
            self._key = following_key(self._key)
            self._cipher = AESGCM(self._key)
            self._records = 0
        nonce = self._records.to_bytes(_NONCE_BYTES, "little")
        self._records += 1
        return self._cipher, nonce


def _memory(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data
