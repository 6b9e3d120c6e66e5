"""Objects of the caller in files that only their owner reads.

The only module that uses cloudpickle. Classes and functions of importable modules are stored as
their import path, those of ``__main__`` or a notebook by value. Reading such a file runs its code,
so :func:`load_object` refuses one that another user owns or may write.
"""

from __future__ import annotations

import io
import linecache
import mmap
import os
import pickle
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock, RLock
from types import CodeType
from typing import Any

import cloudpickle

from psrpc.core.errors import AccessDenied, InvalidData

_APART_NBYTES = 1 << 20
"""Arrays of at least this size follow the pickle, so that readers map them instead of copying."""
_ALIGNED = 64


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        """Makes a new lock of a lock, which data sources have, and keeps the file and lines of
        code, which errors and AutoGraph show; the rest is cloudpickle's."""
        if isinstance(obj, CodeType):
            make, arguments = self.dispatch_table[CodeType](obj)[:2]
            lines = [] if Path(obj.co_filename).is_file() else linecache.getlines(obj.co_filename)
            return _code, (make, arguments, obj.co_filename, lines)
        for kind in (Lock, RLock):
            if type(obj) is type(kind()):
                return kind, ()
        return super().reducer_override(obj)


def _code(
    make: Callable[..., CodeType], arguments: tuple[Any, ...], filename: str, lines: list[str]
) -> CodeType:
    """Returns code of ``filename``; remembers its ``lines`` where there is no such file."""
    if lines:
        linecache.cache.setdefault(filename, (sum(map(len, lines)), None, lines, filename))
    return make(*arguments).replace(co_filename=filename)


def save_object(path: Path, value: object) -> None:
    """Writes ``value`` to the new file ``path``, mode 0600; makes its directory with mode 0700.

    Large arrays in it are written as they are; each reader maps them privately and may change them.

    Raises:
        InvalidData: the object, or a part of it, cannot be pickled.
        AccessDenied: another user owns the directory or may write to it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(path.parent, path.parent.stat(), 0o022)
    apart: list[pickle.PickleBuffer] = []

    def goes_along(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _APART_NBYTES:
            return True
        apart.append(buffer)
        return False

    pickled = io.BytesIO()
    try:
        _Pickler(pickled, protocol=5, buffer_callback=goes_along).dump(value)
    except Exception as error:
        raise InvalidData(
            f"{type(value).__name__} cannot be handed to other processes: {error}; open files, "
            "connections and locks on first use, or leave them out in __getstate__"
        ) from error
    body = pickled.getvalue()
    sizes = [len(body), *(buffer.raw().nbytes for buffer in apart)]
    # A module beside the caller's script is found by the caller's search path alone.
    head = pickle.dumps(([each for each in sys.path if each], sizes))
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for part in (memoryview(body), *(buffer.raw() for buffer in apart)):
            file.write(bytes(-file.tell() % _ALIGNED))
            file.write(part.cast("B"))


def load_object(path: Path) -> Any:
    """Returns the object that :func:`save_object` wrote to ``path``.

    Raises:
        AccessDenied: another user owns the file or its directory, or may write to it.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        _check_own(path.parent, path.parent.stat(), 0o022)
        _check_own(path, os.fstat(file.fileno()), 0o022)
        # Private and writable: a dataset may shuffle its arrays in place.
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    at = 8 + int.from_bytes(whole[:8], "little")
    places, sizes = pickle.loads(whole[8:at])
    sys.path.extend(each for each in places if each not in sys.path)
    parts = []
    for size in sizes:
        at += -at % _ALIGNED
        parts.append(whole[at : at + size])
        at += size
    return pickle.loads(parts[0], buffers=parts[1:])


def _check_own(path: Path, found: os.stat_result, forbidden: int) -> None:
    """Refuses a file or directory of another user, or with a ``forbidden`` bit in its mode."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        raise AccessDenied(
            f"{str(path)!r} belongs to user {found.st_uid}, this process to user {os.geteuid()}; "
            "a file with code must belong to the user that runs it"
        )
    if mode & forbidden:
        raise AccessDenied(
            f"{str(path)!r} has mode {mode:04o}, so other users may reach code in it; "
            f"chmod {mode & ~forbidden:04o} it, or choose another directory"
        )
