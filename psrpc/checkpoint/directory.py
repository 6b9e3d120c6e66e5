"""Commits and removes the directory of a checkpoint, and compares its files with the manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from psrpc.checkpoint.manifest import MANIFEST, TEMPORARY, Manifest
from psrpc.core.document import check_extent
from psrpc.core.errors import CheckpointError, disk_code
from psrpc.core.shard_reports import RowsFileEntry
from psrpc.files.durable import give_name
from psrpc.files.storage import DISK, Storage


def commit(temporary: Path, final: Path, manifest: Manifest, storage: Storage = DISK) -> None:
    """Writes the manifest into ``temporary``, which has the shards' files, and renames that to its
    sibling ``final``. This makes it a checkpoint.

    Raises:
        CheckpointError: a file is not as the manifest says, the manifest is too large to be read
            again, ``final`` exists already, or the operating system refused. ``final`` is unchanged
            then, except for the case described in :func:`psrpc.files.durable.give_name`.
    """
    try:
        for file in manifest.every:
            check_size(temporary, file, storage)
        storage.write(temporary / MANIFEST, [_readable(final, manifest)])
        storage.sync(temporary)
        give_name(temporary, final, storage)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise CheckpointError(
            f"checkpoint {final} cannot be committed: {error.strerror}{where}",
            code=disk_code(error),
        ) from error


def remove_checkpoint(directory: Path, storage: Storage = DISK) -> None:
    """Removes a committed checkpoint. Renames it first, so that its remains after a crash are not
    taken for a damaged checkpoint.

    Raises:
        CheckpointError: the operating system refused.
    """
    removed = directory.with_name(f"{TEMPORARY}{directory.name}.removed")
    try:
        storage.rename(directory, removed)
        storage.sync(directory.parent)
        storage.remove(removed)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be removed: {error.strerror}") from error


def verify(directory: Path, manifest: Manifest, storage: Storage = DISK) -> None:
    """Compares the contents of all files with the manifest.

    Raises:
        CheckpointError: a file is missing, torn or changed; names the file, the expected and the
            actual value.
    """
    for file in manifest.every:
        verify_file(directory, file, storage)


def check_size(directory: Path, file: RowsFileEntry, storage: Storage = DISK) -> None:
    """Compares the size of one file with the manifest. Raises CheckpointError and OSError."""
    path = directory / file.name
    with storage.open(path) as opened:
        nbytes = opened.seek(0, 2)
    if nbytes != file.nbytes:
        raise CheckpointError(f"{path} has {nbytes} bytes; expected {file.nbytes}")


def verify_file(directory: Path, file: RowsFileEntry, storage: Storage = DISK) -> None:
    """Compares the content of one file with the manifest. Raises CheckpointError."""
    path = directory / file.name
    digest = hashlib.sha256()
    buffer = bytearray(1 << 20)
    try:
        with storage.open(path) as opened:
            nbytes = opened.seek(0, 2)
            if nbytes != file.nbytes:
                raise CheckpointError(f"{path} has {nbytes} bytes; expected {file.nbytes}")
            opened.seek(0)
            while nbytes > 0 and (count := opened.readinto(buffer)):
                nbytes -= count
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(f"{path} has SHA-256 {digest.hexdigest()}; expected {file.sha256}")


def _readable(final: Path, manifest: Manifest) -> bytes:
    try:
        data = manifest.to_json()
        check_extent(data)
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {final} cannot be committed: its manifest could not be read again: "
            f"{error}; lower full_checkpoint_every where files of rows are many"
        ) from None
    return data
