"""Checkpoints: a directory with one file per shard and a manifest that is written last.

A directory is a checkpoint only if its manifest is valid. The order of writing is: the shards'
files into a temporary directory, each with fsync; fsync of that directory; ``manifest.json`` with
their sizes and SHA-256; rename to the final name; fsync of the parent. A checkpoint of any number
of shards can be loaded into any other number.

:mod:`psrpc.checkpoint.shard_file` defines the form of a shard's file,
:mod:`psrpc.checkpoint.rows_file` that of the files with rows of tables, and
:mod:`psrpc.checkpoint.manifest` that of the manifest. :mod:`psrpc.checkpoint.directory` commits
checkpoints, and :mod:`psrpc.files.storage` writes their files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from psrpc.checkpoint.choice import Choice, newest_good
from psrpc.checkpoint.directory import commit, verify
from psrpc.checkpoint.load import check_room, compare_variables, load_state, load_variables, opened
from psrpc.checkpoint.manifest import Manifest, ManifestFile, read_manifest
from psrpc.checkpoint.shard_file import (
    NDArray,
    ShardState,
    WrittenFile,
    shard_file_name,
    write_shard_file,
)
from psrpc.core.intervals import IntervalSet
from psrpc.core.plan import AVERAGES, MEAN_SQUARE
from psrpc.core.shard_reports import RowsFileEntry
from psrpc.files.storage import DISK, Storage

__all__ = [
    "Choice",
    "Manifest",
    "ManifestFile",
    "RowsFileEntry",
    "ShardState",
    "WrittenFile",
    "applied_sets",
    "check_file",
    "check_room",
    "commit",
    "compare_variables",
    "exported_variables",
    "load_state",
    "load_variables",
    "newest_good",
    "read_manifest",
    "shard_file_name",
    "slot_names",
    "verify",
    "write_shard_file",
]


def exported_variables(
    directory: Path, manifest: Manifest, storage: Storage = DISK
) -> dict[str, NDArray]:
    """Returns whole variables for an export. Moving averages of the optimizer replace the
    parameters, as in Keras at the end of ``fit``.

    Raises:
        CheckpointError: the files are damaged.
    """
    # Before the first update the averages are still their initial zeros.
    averages = AVERAGES if manifest.global_step else None
    return load_variables(directory, prefer_slot=averages, storage=storage)


def check_file(
    directory: Path, manifest: Manifest, file: ManifestFile, storage: Storage = DISK
) -> None:
    """Verifies the file with one shard's arenas completely, as a restart does.
    :func:`psrpc.checkpoint.rows_chain.check_chain` verifies the files with rows.

    Raises:
        CheckpointError: a restart would refuse the file.
    """
    with opened(directory, manifest, file, storage) as reader:
        for _ in reader:
            pass


def applied_sets(
    directory: Path,
    manifest: Manifest,
    storage: Storage = DISK,
    kind: Literal["applied", "skipped"] = "applied",
) -> list[dict[int, IntervalSet]]:
    """Returns the positions that each shard has applied, or skipped, by epoch. Reads only the
    headers of the files, so their tensors may still be damaged.

    Raises:
        CheckpointError: a header cannot be read.
    """
    sets = []
    for file in manifest.files:
        with opened(directory, manifest, file, storage) as reader:
            sets.append(
                {
                    entry["epoch"]: IntervalSet((a, b) for a, b in entry[kind])
                    for entry in reader.header.applied
                }
            )
    return sets


def slot_names(directory: Path, manifest: Manifest, storage: Storage = DISK) -> list[str]:
    """Returns the sorted names of the optimizer's slots and scalars in a checkpoint; reads only
    the files' headers.

    Raises:
        CheckpointError: a header cannot be read.
    """
    names = set()
    for file in manifest.files:
        with opened(directory, manifest, file, storage) as reader:
            names |= {entry["slot"] for entry in reader.header.entries.values()}
    return sorted(names - {"", MEAN_SQUARE})
