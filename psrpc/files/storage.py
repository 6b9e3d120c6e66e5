"""The few operations on files that checkpoints are made of, each with what it makes last.

Everything that is read from a run directory is opened by :func:`open_regular`, for others may have
put it there. Symbolic links are followed: runs and checkpoints are moved to other disks that way,
and what is read is bounded and checked wherever it lies.

Nothing here is ever done twice: after a failed ``fsync`` the system may hold the pages for clean,
so a second one would succeed and mean nothing (Rebello et al., "Can applications recover from
fsync failures?", USENIX ATC 2020).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from psrpc.core.document import LARGEST, parse_json


@dataclass(frozen=True, slots=True)
class Written:
    """What a file came to; ``sha256`` is hexadecimal."""

    nbytes: int
    sha256: str


class Storage(Protocol):
    """A file system. Every method raises OSError; who calls it says what that means."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory that is not there yet, in one that is. Its name lasts after
        :meth:`sync` of that one; see :mod:`psrpc.files.durable`."""

    def is_empty(self, path: Path) -> bool:
        """Whether a directory holds nothing that can be seen, or is not there."""

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

    def remove_empty(self, directory: Path) -> None:
        """Removes a directory that holds nothing; any other is an OSError."""

    def open(self, path: Path) -> io.BufferedIOBase:
        """Opens a regular file to be read; anything else is an OSError at once."""

    def directories(self, path: Path) -> list[str]:
        """The names of the directories in ``path``, sorted; none where there is no such place."""

    def free(self, path: Path) -> int:
        """Bytes that can still be written below ``path``."""


class Disk:
    """The real one."""

    def make_directory(self, path: Path) -> None:
        """See :class:`Storage`."""
        path.mkdir()

    def is_empty(self, path: Path) -> bool:
        """See :class:`Storage`."""
        try:
            with os.scandir(path) as entries:
                return next(entries, None) is None
        except FileNotFoundError:
            return True
        except PermissionError:
            return False

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
        try:
            shutil.rmtree(directory)
        except RecursionError:
            raise OSError(errno.ELOOP, "Directories are nested too deep", str(directory)) from None

    def remove_empty(self, directory: Path) -> None:
        """See :class:`Storage`."""
        directory.rmdir()

    def open(self, path: Path) -> io.BufferedIOBase:
        """See :class:`Storage`."""
        return open_regular(path)

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


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file to be read, and waits for nobody: a FIFO has no writer, a device no end.

    Raises:
        OSError: there is none, or something else is in its place.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        check_regular(os.fstat(handle).st_mode, path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(mode: int, path: Path) -> None:
    """Raises OSError: ``mode`` is not that of a regular file; says what is there."""
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    raise OSError(errno.EINVAL, f"It is {kind}; expected a regular file", str(path))


def read_bounded(path: Path, most: int = LARGEST, storage: Storage = DISK) -> bytes:
    """A small file, whole.

    Raises:
        OSError: it cannot be read, or has more than ``most`` bytes; none of them are read then.
    """
    with storage.open(path) as file:
        nbytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        data = b"" if nbytes > most else file.read(most + 1)
    if max(nbytes, len(data)) > most:
        why = f"It has {max(nbytes, len(data))} bytes; expected {most} at most"
        raise OSError(errno.EINVAL, why, str(path))
    return data


def read_json(path: Path, most: int = LARGEST) -> Any:
    """The document in a small file, see :func:`psrpc.core.document.parse_json`.

    Raises:
        OSError: see :func:`read_bounded`.
        ValueError: it is no such document; says why, and not which file.
    """
    return parse_json(read_bounded(path, most))


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Writes a small file whole: a reader sees the old one or the new one. What else has its
    temporary name, left by a crash or put there, is removed.

    Args:
        private: its owner alone may read it, whatever the umask and the old one said.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    mode = 0o600 if private else 0o666
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def make_private(path: Path) -> None:
    """Lets nobody but its owner read a file that is there; nothing happens to a link, to a file of
    another user, or where there is none."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(path.lstat().st_mode):
            path.chmod(0o600)


def unreadable(path: Path, error: OSError | ValueError) -> str:
    """A line that names a file that cannot be read, and why."""
    return f"{path} cannot be read: {cause_of(error)}"


def cause_of(error: OSError | ValueError) -> str:
    """Why a file cannot be read, without its name."""
    return str(getattr(error, "strerror", None) or error)
