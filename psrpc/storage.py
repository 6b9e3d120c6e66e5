"""The few operations on files that checkpoints are made of, each with what it makes last.

Nothing here is ever done twice: after a failed ``fsync`` the system may hold the pages for clean,
so a second one would succeed and mean nothing (Rebello et al., "Can applications recover from
fsync failures?", USENIX ATC 2020).
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Written:
    """What a file came to; ``sha256`` is hexadecimal."""

    nbytes: int
    sha256: str


class Storage(Protocol):
    """A file system. Every method raises OSError; who calls it says what that means."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory that is not there yet, and those above it; their names last."""

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        """Writes a file that is not there yet. Its bytes last; its name does not before
        :meth:`sync`. When it raises, the file may be there in part."""

    def link(self, old: Path, new: Path) -> None:
        """Gives a file that lasts a second name, in another directory; the bytes are not written
        again. The name lasts after :meth:`sync`. Not every file system can."""

    def sync(self, directory: Path) -> None:
        """Makes the names in a directory last."""

    def rename(self, old: Path, new: Path) -> None:
        """Renames a directory, in one piece; not onto one that holds something. The new name
        lasts after :meth:`sync` of the directory above."""

    def remove(self, directory: Path) -> None:
        """Removes a directory with all that it holds."""

    def open(self, path: Path) -> io.BufferedIOBase:
        """Opens a file to be read."""

    def directories(self, path: Path) -> list[str]:
        """The names of the directories in ``path``, sorted; none where there is no such place."""

    def free(self, path: Path) -> int:
        """Bytes that can still be written below ``path``."""


class Disk:
    """The real one."""

    def make_directory(self, path: Path) -> None:
        """See :class:`Storage`."""
        if not path.parent.is_dir():
            self.make_directory(path.parent)
        path.mkdir()
        self.sync(path.parent)

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        """See :class:`Storage`."""
        digest, nbytes = hashlib.sha256(), 0
        with path.open("xb", buffering=0) as file:
            for part in parts:
                digest.update(part)
                view = memoryview(part)
                while view:
                    view = view[os.write(file.fileno(), view) :]
                nbytes += len(part)
            os.fsync(file.fileno())
        return Written(nbytes, digest.hexdigest())

    def link(self, old: Path, new: Path) -> None:
        """See :class:`Storage`."""
        os.link(old, new)

    def sync(self, directory: Path) -> None:
        """See :class:`Storage`."""
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """See :class:`Storage`."""
        old.rename(new)

    def remove(self, directory: Path) -> None:
        """See :class:`Storage`."""
        shutil.rmtree(directory)

    def open(self, path: Path) -> io.BufferedIOBase:
        """See :class:`Storage`."""
        return path.open("rb")

    def directories(self, path: Path) -> list[str]:
        """See :class:`Storage`."""
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def free(self, path: Path) -> int:
        """See :class:`Storage`."""
        return shutil.disk_usage(path).free


DISK = Disk()
