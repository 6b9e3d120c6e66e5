"""Memory that a worker shares with the shards on its host; see
docs/design/0005-shared-segment.md."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hmac
import mmap
import os
import secrets
import stat
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import ALIGNMENT_BYTES
from psrpc.ops.process import available_nbytes

NDArray = npt.NDArray[Any]

HANDSHAKE_BYTES = 4096
"""Size of the first page, with a slot of nonce and proof per shard; tensors follow.
Load-bearing."""

SLOT_BYTES = 64
"""Size of a slot: 32 bytes of nonce, which the shard overwrites with 32 bytes of proof.
Load-bearing."""

SLOTS = HANDSHAKE_BYTES // SLOT_BYTES
"""Maximum number of shards to which one segment can be offered."""

_SECRET_BYTES = 32
_MFD_NOEXEC_SEAL = 0x0008
_MAP_FAILED = ctypes.c_void_p(-1).value


class SegmentUnavailable(Exception):
    """A worker cannot create a segment, or a shard refuses it; tensors then travel in chunks."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Identifies a segment to a shard; same fields as the protobuf message ``Attach``."""

    pid: int
    fd: int
    nbytes: int
    slot: int
    nonce: bytes = field(repr=False)


def why_unavailable() -> str:
    """Why this system cannot share segments; empty if it can."""
    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memfd_create"
    if not os.access("/proc/self/fd", os.R_OK):
        return "/proc is not mounted"
    return ""


class Segment:
    """A worker's shared memory: a memfd, sealed against resizing and without a name on disk.

    The kernel frees it when the worker and all attached shards have released it or died. Not
    thread-safe, except that operations on different slots are independent.

    Attributes:
        bytes: ``[nbytes]`` uint8, the whole memory, page-aligned. Zero after the first page.
    """

    def __init__(self, fd: int, memory: NDArray) -> None:
        self._fd = fd
        self.bytes = memory

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Creates a segment of ``nbytes``, including the first page, and allocates all of its
        memory.

        It ignores a container's memory limit, which the kernel enforces by killing as for any
        memory.

        Raises:
            SegmentUnavailable: the system does not support it or lacks memory. Nothing is kept.
        """
        assert nbytes > HANDSHAKE_BYTES
        if why := why_unavailable():
            raise SegmentUnavailable(why)
        # With overcommit, a request for too much memory does not fail; the kernel kills a process.
        available = available_nbytes()
        if nbytes > available:
            raise SegmentUnavailable(
                f"a segment of {nbytes >> 20} MiB is needed; {available >> 20} MiB of memory are"
                " available"
            )
        try:
            fd = _memfd()
        except OSError as error:
            raise SegmentUnavailable(f"memfd_create failed: {error.strerror}") from None
        try:
            # A page that is not allocated now and unavailable later would kill the process (SIGBUS)
            # in the middle of a step.
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _required_seals())
            memory = _map(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise SegmentUnavailable(
                f"a segment of {nbytes >> 20} MiB could not be made: {error.strerror}"
            ) from None
        # Page faults cost more than the copies they interrupt, so take them here, not in the first
        # step.
        memory[:: mmap.PAGESIZE] = 0
        # No slot may hold a value that could be guessed.
        memory[:HANDSHAKE_BYTES] = _random(HANDSHAKE_BYTES)
        return cls(fd, memory)

    def offset_of(self, array: NDArray) -> int | None:
        """Offset of ``array`` in bytes; None if it is not in the segment or not contiguous.

        For an empty slice it is that of the base array: NumPy keeps no offset."""
        if not array.flags.c_contiguous:
            return None
        offset: int = array.ctypes.data - self.bytes.ctypes.data
        return offset if 0 <= offset <= self.bytes.nbytes - array.nbytes else None

    def offer(self, slot: int) -> Offer:
        """Makes a new offer for the shard of ``slot``; its older offer becomes invalid."""
        nonce = secrets.token_bytes(_SECRET_BYTES)
        _secret(self.bytes, slot)[:] = np.frombuffer(nonce, np.uint8)
        return Offer(os.getpid(), self._fd, self.bytes.nbytes, slot, nonce)

    def proven(self, slot: int, proof: bytes) -> bool:
        """Whether the shard of ``slot`` has written ``proof`` here, so that both see the same
        memory.

        Works once: the slot is refilled, since a process that has read the proof could offer the
        segment."""
        secret = _secret(self.bytes, slot)
        found = secret.tobytes()
        secret[:] = _random(_SECRET_BYTES)
        return hmac.compare_digest(found, proof)

    def close(self) -> None:
        """Releases the memory and makes no more offers.

        Arrays cut from :attr:`bytes` stay valid and keep the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.bytes = np.empty(0, np.uint8)


class AttachedSegment:
    """A worker's segment in a shard, mapped until this object and all views are gone. Thread-safe.

    Attributes:
        proof: 32 random bytes, written to the slot for the worker to check.
    """

    def __init__(self, memory: NDArray, proof: bytes) -> None:
        self._bytes = memory
        self.proof = proof

    def view(self, offset: int, nbytes: int, alignment: int = ALIGNMENT_BYTES) -> NDArray:
        """Returns ``[nbytes]`` uint8 at ``offset``, which a worker has named: writable, not a copy.

        The worker can write there at any time, so copy a value, such as an index, before checking
        it.

        Args:
            alignment: bytes. With less than the default TensorFlow ends the process.

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

    Does not affect any other file that the offer may name: opens for reading and writing only an
    unnamed file that belongs to this user, and maps it only if it is sealed and holds the nonce.

    Args:
        most_nbytes: maximum size of a segment.

    Raises:
        SegmentUnavailable: says why not.
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
    if len(offer.nonce) != _SECRET_BYTES:
        raise SegmentUnavailable(f"a nonce of {len(offer.nonce)} bytes; expected {_SECRET_BYTES}")
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    fd = _open_anonymous(path)
    try:
        _check_sealed(fd, path, offer.nbytes)
        found = os.pread(fd, _SECRET_BYTES, offer.slot * SLOT_BYTES)
        if not hmac.compare_digest(found, offer.nonce):
            raise SegmentUnavailable(
                f"slot {offer.slot} of {path} does not hold the nonce: it is another segment"
            )
        memory = _map(fd, offer.nbytes)
    except OSError as error:
        raise SegmentUnavailable(f"{path} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(fd)
    # Reading maps many pages per fault, before the first step needs them one by one.
    memory[:: mmap.PAGESIZE].max()
    proof = secrets.token_bytes(_SECRET_BYTES)
    _secret(memory, offer.slot)[:] = np.frombuffer(proof, np.uint8)
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
    """Checks that the memfd has ``nbytes`` and is sealed: if it shrank, this process would die."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise SegmentUnavailable(f"{path} is not a memfd") from None
    if seals & _required_seals() != _required_seals():
        raise SegmentUnavailable(f"{path} is not sealed against resizing (seals {seals:#x})")
    found = os.fstat(fd).st_size
    if found != nbytes:
        raise SegmentUnavailable(f"{path} has {found} bytes; expected {nbytes}")


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # Some systems refuse executable memfds.
        return os.memfd_create("pserver-segment", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        # Linux before 6.3 does not know the flag.
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("pserver-segment", flags)


def _required_seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _map(fd: int, nbytes: int) -> NDArray:
    """Maps ``[nbytes]`` uint8. The mapping ends with the last array cut from it.

    Calls the C library: the module mmap blocks all threads of the process while the kernel frees
    memory, for a second with 3 GiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    # At exit the kernel unmaps it; a thread may still use it then.
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


def _secret(memory: NDArray, slot: int) -> NDArray:
    assert 0 <= slot < SLOTS
    return memory[slot * SLOT_BYTES : slot * SLOT_BYTES + _SECRET_BYTES]


def _random(nbytes: int) -> NDArray:
    return np.frombuffer(secrets.token_bytes(nbytes), np.uint8)
