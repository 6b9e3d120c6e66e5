"""Small disks that can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """A file system in memory of this size; skips the test where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs"]
    mounted = subprocess.run(["mount", *options, path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Fills a disk up to so many bytes; the file that does it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as out:
        found = os.statvfs(disk)
        out.write(bytes(max(0, found.f_bavail * found.f_frsize - leave)))
    return filler
