"""Directory names that survive a power cut, even after a failed fsync.

A name lasts once its parent directory is synced after the naming. After a failed sync, another one
succeeds and means nothing (psrpc.files.storage). That may have happened to a name from another
process, so this module renames the directory anew and syncs that."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from psrpc.files.storage import DISK, Storage

RENAMED = ".renamed-"
"""Prefix of a name while :func:`make_last` renames it. Load-bearing: :func:`give_names_back` finds
by it the directories whose process ended in that moment."""

_ANOTHERS = (errno.EACCES, errno.EINVAL, errno.EPERM, errno.EROFS)
"""Errors of syncing a directory that this process may not change, or that supports no sync."""


def make_directory(path: Path, storage: Storage = DISK) -> None:
    """Makes a new directory and its missing parents; their names last. Raises OSError."""
    ensure_directory(path.parent, storage)
    storage.make_directory(path)
    _sync_or_remove(path, storage)


def ensure_directory(path: Path, storage: Storage = DISK) -> None:
    """Makes a directory and its parents where they are missing; their names last. Raises OSError.

    A non-empty directory lasts already: processes fill one only afterwards. An empty one may come
    from a process that died before the sync. If the sync fails, this removes the directory, so that
    the next try makes it anew.
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
    """Renames a directory with lasting contents to its final name, which then lasts.

    Raises:
        OSError: the directory has its old name; or, where restoring it failed too, the final name,
            which a power cut may undo and which is valid only after :func:`make_last`.
    """
    storage.rename(temporary, final)
    try:
        storage.sync(final.parent)
    except OSError:
        with suppress(OSError):
            storage.rename(final, temporary)
        raise


def make_last(directory: Path, storage: Storage = DISK) -> None:
    """Makes the name of a committed directory last, which another process may have given it.

    That process may have died before its fsync, or the fsync may have failed. Since a repeated
    fsync would mean nothing, this renames the directory away and back, so the fsync covers new
    changes. Readers may miss the directory for a moment. May be repeated.

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
