"""Makes names of directories that "last": they survive a power cut, even after a failed fsync.

A name lasts when its parent directory has been synced after the naming. If a sync fails, a second
sync may succeed without effect (see psrpc.files.storage). This may have happened to a name that
another process gave, so this module renames such a directory again and syncs that."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from psrpc.files.storage import DISK, Storage

RENAMED = ".renamed-"
"""Prefix of a name while :func:`make_last` renames it. Load-bearing: by this prefix
:func:`give_names_back` finds directories whose process ended at that moment."""

_ANOTHERS = (errno.EACCES, errno.EINVAL, errno.EPERM, errno.EROFS)
"""Errors when syncing a directory that this process may not change, or that does not support
syncing."""


def make_directory(path: Path, storage: Storage = DISK) -> None:
    """Makes a new directory and its missing parents; their names last. Raises OSError."""
    ensure_directory(path.parent, storage)
    storage.make_directory(path)
    _sync_or_remove(path, storage)


def ensure_directory(path: Path, storage: Storage = DISK) -> None:
    """Makes a directory and its parents if they are missing; their names last. Raises OSError.

    The name of a non-empty directory lasts already, since processes fill a directory only after the
    sync. An empty directory may come from a process that died before the sync. If the sync fails,
    this function removes the directory, so that the next try makes it again.
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
    """Renames a directory, whose contents last already, to its final name, which then lasts.

    Raises:
        OSError: the directory has its old name again. If restoring that failed, too, it has the
            final name, which a power cut may undo and which must not be used before
            :func:`make_last`.
    """
    storage.rename(temporary, final)
    try:
        storage.sync(final.parent)
    except OSError:
        with suppress(OSError):
            storage.rename(final, temporary)
        raise


def make_last(directory: Path, storage: Storage = DISK) -> None:
    """Makes the name of a committed directory last, even if another process gave it.

    That process may have died before its fsync, or the fsync may have failed. Since a repeated
    fsync may have no effect, this function renames the directory away and back, so that its fsync
    covers new changes. Readers may not find the directory for a moment. May be repeated.

    Raises:
        OSError: the name may not last.
    """
    away = directory.with_name(f"{RENAMED}{directory.name}")
    storage.rename(directory, away)
    storage.rename(away, directory)
    storage.sync(directory.parent)


def give_names_back(parent: Path, storage: Storage = DISK) -> None:
    """Restores names in ``parent`` after a process died within :func:`make_last`.

    Raises:
        OSError: a directory may still lack its name.
    """
    for name in storage.directories(parent):
        if name.startswith(RENAMED):
            storage.rename(parent / name, parent / name.removeprefix(RENAMED))
