"""Writes what an attendant hands back at a hold: a copy of a checkpoint with other values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from psrpc.checkpoint.directory import commit
from psrpc.checkpoint.load import load_state
from psrpc.checkpoint.manifest import TEMPORARY, ManifestFile, read_manifest
from psrpc.checkpoint.shard_file import ShardState, write_shard_file
from psrpc.files.storage import DISK, Storage


def write_changed_copy(
    original: Path,
    change: Callable[[int, ShardState], ShardState],
    storage: Storage = DISK,
    suffix: str = ".set",
) -> str:
    """``change`` gets the index and the state of each shard; returns the name of the copy. For jobs
    without tables."""
    manifest = read_manifest(original, storage)
    final = original.with_name(original.name + suffix)
    temporary = original.with_name(TEMPORARY + final.name)
    storage.make_directory(temporary)
    files = []
    for file in manifest.files:
        state = load_state(original, manifest.plan, file.shard, storage=storage)
        written = write_shard_file(
            temporary / file.name,
            manifest.plan,
            file.shard,
            change(file.shard, state),
            run_id=manifest.run_id,
            generation=manifest.generation,
            global_step=manifest.global_step,
            storage=storage,
        )
        files.append(
            ManifestFile(file.shard, file.name, written.nbytes, written.sha256, file.version)
        )
    commit(temporary, final, replace(manifest, name=final.name, files=tuple(files)), storage)
    return final.name
