"""The kernel's view of shared memory: where it is, which processes map it, and limits on it."""

from __future__ import annotations

import fcntl
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pserver.transport.segment import Offer

NBYTES = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
NONCE = bytes(range(32))


def inode(offer: Offer) -> int:
    return Path(f"/proc/{offer.pid}/fd/{offer.fd}").stat().st_ino


def users(number: int) -> set[int]:
    """Process ids that have the memfd with this inode number open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        # Processes end while they are looked at.
        with suppress(OSError):
            mapped = re.search(rf" {number} +/memfd:", (process / "maps").read_text())
            if mapped or any(
                str(link.readlink()).startswith("/memfd:") and link.stat().st_ino == number
                for link in (process / "fd").iterdir()
            ):
                found.add(int(process.name))
    return found


def open_files() -> int:
    """Counts the file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # iterdir would open one more


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Makes the kernel refuse larger files, memfds too. Python ignores the signal that it sends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
