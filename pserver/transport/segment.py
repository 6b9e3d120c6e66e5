"""Memory that a worker shares with the shards on its host; see docs/design/0005-shared-segment.md.
The shards' side is :mod:`pserver.transport.attachment`."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hmac
import mmap
import os
import secrets
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.ops.process import available_nbytes

NDArray = npt.NDArray[Any]

HANDSHAKE_BYTES = 4096
"""Size of the first page. It has a slot per shard, for nonce and proof; tensors follow it.
Load-bearing."""

SLOT_BYTES = 64
"""Size of a slot: 32 bytes of nonce, which the shard overwrites with 32 bytes of proof.
Load-bearing."""

SLOTS = HANDSHAKE_BYTES // SLOT_BYTES
"""Maximum number of shards to which one segment can be offered."""

SECRET_BYTES = 32
"""Size of a nonce, and of a proof. Load-bearing."""

_MFD_NOEXEC_SEAL = 0x0008
_MAP_FAILED = ctypes.c_void_p(-1).value


class SegmentUnavailable(Exception):
    """A worker cannot create a segment, or a shard refuses it. Tensors then travel over the
    network."""


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

        Does not check a container's memory limit. If the segment exceeds that, the kernel kills the
        process, as for any other memory.

        Raises:
            SegmentUnavailable: the system does not support it or lacks memory. Nothing is kept.
        """
        assert nbytes > HANDSHAKE_BYTES
        if why := why_unavailable():
            raise SegmentUnavailable(why)
        # With overcommit, a request for too much memory succeeds, and later the kernel kills a
        # process.
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
            # Allocates all pages now: a page that is not available later would kill the process
            # (SIGBUS) in the middle of a step.
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, required_seals())
            memory = map_shared(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise SegmentUnavailable(
                f"a segment of {nbytes >> 20} MiB could not be made: {error.strerror}"
            ) from None
        # Page faults cost more than the copies that they interrupt, so cause them here, not in the
        # first step.
        memory[:: mmap.PAGESIZE] = 0
        # A slot must not hold a value that another process can guess.
        memory[:HANDSHAKE_BYTES] = _random(HANDSHAKE_BYTES)
        return cls(fd, memory)

    def offset_of(self, array: NDArray) -> int | None:
        """Offset of ``array`` in bytes; None if it is not in the segment or not contiguous.

        For an empty slice it is the offset of the base array, because NumPy keeps no offset for
        empty slices."""
        if not array.flags.c_contiguous:
            return None
        offset: int = array.ctypes.data - self.bytes.ctypes.data
        return offset if 0 <= offset <= self.bytes.nbytes - array.nbytes else None

    def offer(self, slot: int) -> Offer:
        """Makes a new offer for the shard of ``slot``; an older offer for that slot becomes
        invalid."""
        nonce = secrets.token_bytes(SECRET_BYTES)
        secret_in(self.bytes, slot)[:] = np.frombuffer(nonce, np.uint8)
        return Offer(os.getpid(), self._fd, self.bytes.nbytes, slot, nonce)

    def proven(self, slot: int, proof: bytes) -> bool:
        """Returns whether the shard of ``slot`` has written ``proof`` there, which proves that both
        see the same memory.

        Works once per offer: it refills the slot, since a process that has read the proof could
        otherwise pretend to be the shard."""
        secret = secret_in(self.bytes, slot)
        found = secret.tobytes()
        secret[:] = _random(SECRET_BYTES)
        return hmac.compare_digest(found, proof)

    def close(self) -> None:
        """Releases the memory and makes no more offers. Arrays cut from :attr:`bytes` stay valid
        and keep the memory alive."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.bytes = np.empty(0, np.uint8)


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # The flag is needed because some systems refuse executable memfds.
        return os.memfd_create("pserver-segment", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        # Linux before 6.3 does not know the flag.
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("pserver-segment", flags)


def required_seals() -> int:
    """Returns the seals that a memfd needs, so that it cannot shrink while a process has mapped
    it."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def map_shared(fd: int, nbytes: int) -> NDArray:
    """Maps ``[nbytes]`` uint8. The mapping ends with the last array cut from it.

    Calls the C library directly, because Python's ``mmap`` module blocks all threads of the process
    while the kernel frees the memory (a second for 3 GiB)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    # Not at exit: a thread may still use the memory then, and the kernel unmaps it anyway.
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


def secret_in(memory: NDArray, slot: int) -> NDArray:
    """Returns a view of the nonce or proof in ``slot``, ``[SECRET_BYTES]`` uint8."""
    assert 0 <= slot < SLOTS
    return memory[slot * SLOT_BYTES : slot * SLOT_BYTES + SECRET_BYTES]


def _random(nbytes: int) -> NDArray:
    return np.frombuffer(secrets.token_bytes(nbytes), np.uint8)
