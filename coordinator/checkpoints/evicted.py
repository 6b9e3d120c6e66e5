"""Evicted rows of a run: keeps them when their checkpoint is removed, and finds them again.

Each checkpoint has the rows evicted since the previous one. So the evicted rows of a
state are spread over all checkpoints of its history; their files stay when those are removed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from coordinator.records.ledger_file import unreadable_ledger
from coordinator.records.run_directory import LEDGER
from coordinator.records.store import Store
from coordinator.records.stored_values import RestoredGeneration
from psrpc.checkpoint.choice import find_checkpoints
from psrpc.checkpoint.evicted_file import Source
from psrpc.checkpoint.manifest import MANIFEST, TEMPORARY, Manifest, read_manifest
from psrpc.core.errors import CheckpointError
from psrpc.core.names import CHECKPOINTS
from psrpc.files.durable import give_name, give_names_back, make_directory, make_last
from psrpc.files.storage import DISK, Storage

EVICTED = "evicted"
"""Below the run directory: for each removed checkpoint with evicted rows, a directory of its name
with these rows and its manifest. Load-bearing."""

COPY_NBYTES = 1 << 20


def keep_evicted(checkpoint: Path, storage: Storage = DISK) -> None:
    """Keeps the evicted rows of a checkpoint that is about to be removed. Idempotent.

    Raises:
        CheckpointError: its manifest cannot be read, or the operating system refused.
    """
    manifest = read_manifest(checkpoint, storage)
    names = [file.evicted.name for file in manifest.files if file.evicted is not None]
    if not names:
        return
    kept = checkpoint.parent.parent / EVICTED
    final, temporary = kept / checkpoint.name, kept / f"{TEMPORARY}{checkpoint.name}"
    try:
        give_names_back(kept, storage)
        present = storage.directories(kept)
        if final.name in present:
            make_last(final, storage)
            return
        if temporary.name in present:
            storage.remove(temporary)
        make_directory(temporary, storage)
        for name in (*names, MANIFEST):
            storage.write(temporary / name, _pieces(checkpoint / name, storage))
        storage.sync(temporary)
        give_name(temporary, final, storage)
    except OSError as error:
        with suppress(OSError):
            storage.remove(temporary)
        raise CheckpointError(
            f"evicted rows of {checkpoint} cannot be kept in {final}: {error.strerror}"
        ) from error


def evicted_of(checkpoint: Path, manifest: Manifest) -> tuple[list[Source], list[str]]:
    """Returns the sources of the evicted rows of a checkpoint and its whole history, oldest first,
    and remarks on skipped checkpoints. Excludes rows that a shard lost by a restore, and other
    runs.

    Raises:
        CheckpointError: the run's directory cannot be read.
    """
    run_dir = checkpoint.parent.parent
    found = find_checkpoints(run_dir / EVICTED), find_checkpoints(run_dir / CHECKPOINTS)
    refused = [one for each in found for one in each.refused]
    remarks = [f"passed over {path.name}: {reason}" for path, reason in refused]
    sources = {one.name: (path, one) for each in found for path, one in each.manifests}
    sources[manifest.name] = checkpoint, manifest
    restored = _restored(run_dir)
    behind = []
    for path, one in sources.values():
        if one.run_id != manifest.run_id:
            continue
        ages = _age(one), _age(manifest)
        files = tuple(file for file in one.files if is_behind(*ages, file.shard, restored))
        if files:
            behind.append((path, replace(one, files=files)))
    return sorted(behind, key=lambda source: _age(source[1])), remarks


def is_behind(
    one: tuple[int, int], other: tuple[int, int], shard: int, restored: Iterable[RestoredGeneration]
) -> bool:
    """Whether checkpoint ``one`` is ``other``, or precedes it in the history of ``shard``. Both are
    a generation and a global step."""
    if one > other:
        return False
    gone_behind = (
        one > (each.generation, each.global_step)
        for each in restored
        if shard not in each.kept and one[0] < each.formed <= other[0]
    )
    return not any(gone_behind)


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.generation, manifest.global_step


def _restored(run_dir: Path) -> list[RestoredGeneration]:
    store = Store(run_dir / LEDGER)
    try:
        store.open_to_read()
        return store.restored()
    except sqlite3.Error as error:
        raise unreadable_ledger(run_dir / LEDGER, error) from None
    finally:
        store.close()


def _pieces(path: Path, storage: Storage) -> Iterator[bytes]:
    with storage.open(path) as file:
        while piece := file.read(COPY_NBYTES):
            yield piece
