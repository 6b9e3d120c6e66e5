"""A shard's end of a shared segment: attaches it after checking that it is the one that a worker
offers."""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
import stat

import numpy as np

from pserver.transport.segment import (
    HANDSHAKE_BYTES,
    SECRET_BYTES,
    SLOT_BYTES,
    SLOTS,
    NDArray,
    Offer,
    SegmentUnavailable,
    map_shared,
    required_seals,
    secret_in,
    why_unavailable,
)
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import ALIGNMENT_BYTES


class AttachedSegment:
    """A worker's segment in a shard, mapped until this object and all views are gone. Thread-safe.

    Attributes:
        proof: 32 random bytes. The shard has written them to its slot; the worker checks them.
    """

    def __init__(self, memory: NDArray, proof: bytes) -> None:
        self._bytes = memory
        self.proof = proof

    def view(self, offset: int, nbytes: int, alignment: int = ALIGNMENT_BYTES) -> NDArray:
        """Returns a writable view, ``[nbytes]`` uint8, at an ``offset`` that a worker has named.

        The worker can write there at any time, so copy a value, such as an index, before checking
        it.

        Args:
            alignment: bytes. TensorFlow ends the process if it gets an array with less than the
                default.

        Raises:
            InvalidArgument: outside the segment, in its first page, or not aligned.
        """
        end = self._bytes.nbytes
        if nbytes < 0 or not HANDSHAKE_BYTES <= offset <= end - nbytes:
            raise InvalidArgument(
                f"{nbytes} bytes at offset {offset} of the shared segment; expected them between"
                f" {HANDSHAKE_BYTES} and {end}"
            )
        if offset % alignment:
            raise InvalidArgument(
                f"offset {offset} of the shared segment; expected a multiple of {alignment}"
            )
        return self._bytes[offset : offset + nbytes]


def attach(offer: Offer, most_nbytes: int) -> AttachedSegment:
    """Maps an offered segment and writes the proof into its slot.

    An offer may name any other file, so no side effect on that is possible: it opens for reading
    and writing only an unnamed file that belongs to this user, and maps it only if it is sealed and
    holds the nonce.

    Args:
        most_nbytes: maximum size of a segment.

    Raises:
        SegmentUnavailable: the segment cannot be attached; the message says why.
    """
    if why := why_unavailable():
        raise SegmentUnavailable(why)
    if not HANDSHAKE_BYTES < offer.nbytes <= most_nbytes:
        raise SegmentUnavailable(
            f"a segment of {offer.nbytes} bytes; expected more than {HANDSHAKE_BYTES}, at most"
            f" {most_nbytes}"
        )
    if not 0 <= offer.slot < SLOTS:
        raise SegmentUnavailable(f"slot {offer.slot} of a segment; expected one below {SLOTS}")
    if len(offer.nonce) != SECRET_BYTES:
        raise SegmentUnavailable(f"a nonce of {len(offer.nonce)} bytes; expected {SECRET_BYTES}")
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    fd = _open_anonymous(path)
    try:
        _check_sealed(fd, path, offer.nbytes)
        found = os.pread(fd, SECRET_BYTES, offer.slot * SLOT_BYTES)
        if not hmac.compare_digest(found, offer.nonce):
            raise SegmentUnavailable(
                f"slot {offer.slot} of {path} does not hold the nonce: it is another segment"
            )
        memory = map_shared(fd, offer.nbytes)
    except OSError as error:
        raise SegmentUnavailable(f"{path} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(fd)
    # Reading in order maps many pages per fault; otherwise the first step would fault on each page.
    memory[:: mmap.PAGESIZE].max()
    proof = secrets.token_bytes(SECRET_BYTES)
    secret_in(memory, offer.slot)[:] = np.frombuffer(proof, np.uint8)
    return AttachedSegment(memory, proof)


def _open_anonymous(path: str) -> int:
    """Opens for reading and writing an unnamed file that belongs to this user."""
    try:
        # O_PATH has no side effects, which opening a device or a pipe may have.
        named = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentUnavailable(
            f"{path} cannot be opened ({error.strerror}): worker and shard have to be of one user,"
            " host and PID namespace"
        ) from None
    try:
        status = os.fstat(named)
        if not stat.S_ISREG(status.st_mode):
            raise SegmentUnavailable(f"{path} is not a regular file")
        if status.st_nlink:
            raise SegmentUnavailable(f"{path} is a file that has a name")
        if status.st_uid != os.geteuid():
            raise SegmentUnavailable(
                f"{path} belongs to user {status.st_uid}; expected {os.geteuid()}"
            )
        return os.open(f"/proc/self/fd/{named}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentUnavailable(f"{path} cannot be written to: {error.strerror}") from None
    finally:
        os.close(named)


def _check_sealed(fd: int, path: str, nbytes: int) -> None:
    """Checks that the memfd has ``nbytes`` and is sealed against resizing, because this process
    would die if it shrank."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise SegmentUnavailable(f"{path} is not a memfd") from None
    if seals & required_seals() != required_seals():
        raise SegmentUnavailable(f"{path} is not sealed against resizing (seals {seals:#x})")
    found = os.fstat(fd).st_size
    if found != nbytes:
        raise SegmentUnavailable(f"{path} has {found} bytes; expected {nbytes}")
