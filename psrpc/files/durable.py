"""Names of directories that outlive a power cut, also where an fsync has failed.

A name lasts once the directory above was synced after it was given. After a sync that failed
another one succeeds and means nothing (psrpc.files.storage), and so it may be for a name that
another process has given: then the name is given anew, and that is synced."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from psrpc.files.storage import DISK, Storage

RENAMED = ".renamed-"
"""What a name begins with for the moment in which :func:`make_last` gives it anew. Load-bearing:
:func:`give_names_back` finds those whose process ended in that moment."""

_ANOTHERS = (errno.EACCES, errno.EINVAL, errno.EPERM, errno.EROFS)
"""What the sync of a place is refused with that is not this process's to change, or that knows of
none."""


def make_directory(path: Path, storage: Storage = DISK) -> None:
    """Makes a directory that is not there yet, and those above it; their names last.

    Raises:
        OSError: the operating system refused.
    """
    ensure_directory(path.parent, storage)
    storage.make_directory(path)
    _sync_or_remove(path, storage)


def ensure_directory(path: Path, storage: Storage = DISK) -> None:
    """Makes a directory and those above it, where they are not there; their names last.

    One that is there and holds something lasts: nothing is put into it before. One that is empty
    may be of a process that died before the sync. A directory whose sync fails is removed, so that
    it is made anew the next time.

    Raises:
        OSError: the operating system refused.
    """
    if path == path.parent or not storage.is_empty(path):
        return
    ensure_directory(path.parent, storage)
    try:
        storage.make_directory(path)
    except FileExistsError:
        try:
            _sync_or_remove(path, storage)
        except OSError as error:
            if error.errno not in _ANOTHERS:
                raise
    else:
        _sync_or_remove(path, storage)


def _sync_or_remove(path: Path, storage: Storage) -> None:
    """Makes the name of an empty directory last."""
    try:
        storage.sync(path.parent)
    except OSError as error:
        if error.errno not in _ANOTHERS:
            with suppress(OSError):
                storage.remove_empty(path)
        raise


def give_name(temporary: Path, final: Path, storage: Storage = DISK) -> None:
    """Gives a directory whose contents last its final name, which lasts then.

    Raises:
        OSError: it has its name of before; or, where that could not be given back either, one that
            a power cut may take, and that counts only after :func:`make_last`.
    """
    storage.rename(temporary, final)
    try:
        storage.sync(final.parent)
    except OSError:
        with suppress(OSError):
            storage.rename(final, temporary)
        raise


def make_last(directory: Path, storage: Storage = DISK) -> None:
    """Makes the name of a committed directory last that another process may have given it.

    That process may have died before its fsync, or the fsync may have failed. After a failed one
    another fsync succeeds and means nothing, so the directory is renamed away and back: the fsync
    that follows is one of new changes. Readers may miss the directory for a moment. May be
    repeated.

    Raises:
        OSError: the name may not last.
    """
    away = directory.with_name(f"{RENAMED}{directory.name}")
    storage.rename(directory, away)
    storage.rename(away, directory)
    storage.sync(directory.parent)


def give_names_back(parent: Path, storage: Storage = DISK) -> None:
    """Undoes the half of a :func:`make_last` in ``parent`` that a process did not live to finish.

    Raises:
        OSError: a directory may be without its name still.
    """
    for name in storage.directories(parent):
        if name.startswith(RENAMED):
            storage.rename(parent / name, parent / name.removeprefix(RENAMED))
