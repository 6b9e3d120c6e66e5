"""The file operations of checkpoints, with their guarantees against a power cut.

Every file of a run directory must be opened for reading with :func:`open_regular`, since another
user may have put it there. It follows symbolic links, since users move runs and checkpoints to
other disks by these; so callers must limit and check the contents.

No function retries: after a failed ``fsync`` the system may mark the pages as clean, so a second
``fsync`` would succeed although nothing was written (Rebello et al., "Can applications recover from
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
    """Size and hexadecimal ``sha256`` of a written file."""

    nbytes: int
    sha256: str


class Storage(Protocol):
    """A file system. Every method may raise OSError. A file or name "lasts" if it survives a power
    cut."""

    def make_directory(self, path: Path) -> None:
        """Makes a new directory in an existing one. Its name lasts after :meth:`sync` of the
        parent; see :mod:`psrpc.files.durable`."""

    def is_empty(self, path: Path) -> bool:
        """Whether a directory is missing, or is readable and empty."""

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        """Writes a new file. Its bytes last; its name lasts after :meth:`sync`. An error may
        leave a partial file."""

    def link(self, old: Path, new: Path) -> None:
        """Makes a hard link in another directory to a file that lasts. The new name lasts after
        :meth:`sync`. Not every file system supports this."""

    def sync(self, directory: Path) -> None:
        """Makes the names in a directory last."""

    def rename(self, old: Path, new: Path) -> None:
        """Renames a directory atomically, but not onto a non-empty one. The new name lasts after
        :meth:`sync` of the parent."""

    def remove(self, directory: Path) -> None:
        """Removes a directory recursively."""

    def remove_empty(self, directory: Path) -> None:
        """Removes an empty directory; any other is an OSError."""

    def open(self, path: Path) -> io.BufferedIOBase:
        """Opens a regular file for reading; anything else is an OSError at once."""

    def directories(self, path: Path) -> list[str]:
        """Returns the sorted names of directories in ``path``; empty if ``path`` is missing."""

    def free(self, path: Path) -> int:
        """Returns the free bytes below ``path``."""


class Disk:
    """The operating system's file system."""

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
    """Opens a regular file for reading. Never blocks, as opening a FIFO without a writer would.

    Raises:
        OSError: the file is missing or not a regular one.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        check_regular(os.fstat(handle).st_mode, path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(mode: int, path: Path) -> None:
    """Raises OSError if ``mode`` is not that of a regular file; names the kind."""
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    raise OSError(errno.EINVAL, f"It is {kind}; expected a regular file", str(path))


def read_bounded(path: Path, most: int = LARGEST, storage: Storage = DISK) -> bytes:
    """Reads a small file.

    Raises:
        OSError: the file is unreadable or has more than ``most`` bytes.
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
    """Parses a small file, see :func:`psrpc.core.document.parse_json`.

    Raises:
        OSError: see :func:`read_bounded`.
        ValueError: the document is invalid; says why, but does not name the file.
    """
    return parse_json(read_bounded(path, most))


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replaces a small file atomically: a reader sees the old or the new text. Removes any file
    with the temporary name first.

    Args:
        private: whether only the owner may read the new file, whatever the umask and the old file's
            mode are.

    Raises:
        OSError: the write failed; the old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    mode = 0o600 if private else 0o666
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def make_private(path: Path) -> None:
    """Lets only the owner read an existing file; leaves links and other users' files alone."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(path.lstat().st_mode):
            path.chmod(0o600)


def unreadable(path: Path, error: OSError | ValueError) -> str:
    """Formats a line with an unreadable file and the reason."""
    return f"{path} cannot be read: {cause_of(error)}"


def cause_of(error: OSError | ValueError) -> str:
    """Returns why a file is unreadable, without its name."""
    return str(getattr(error, "strerror", None) or error)
