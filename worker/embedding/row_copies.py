"""The files of rows in a changed copy of a checkpoint, which shards restore."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from pserver.tables.rules import make_row_rule
from psrpc.checkpoint.manifest import Manifest, ManifestFile
from psrpc.checkpoint.rows_chain import optimizer_kind
from psrpc.checkpoint.rows_file import RowsHeader, TableRows, rows_file_name, write_rows_file
from psrpc.checkpoint.rows_reader import RowsReader
from psrpc.checkpoint.shard_file import NDArray
from psrpc.core.errors import CheckpointError, disk_code, disk_reason
from psrpc.core.shard_reports import RowsFileEntry
from psrpc.core.tables import TableSpec, shard_of
from psrpc.files.storage import DISK
from worker.embedding.trained import TableState


def link_rows(checkpoint: Path, file: ManifestFile, to: Path) -> None:
    """Gives the directory ``to`` a shard's files of rows, and of evicted rows, of a checkpoint: by
    hard links, or as copies where the file system has none.

    Raises:
        CheckpointError: the operating system refused.
    """
    for entry in file.every[1:]:
        _link(checkpoint / entry.name, to / entry.name)


def link_checkpoint(checkpoint: Path, to: Path) -> None:
    """Makes ``to``, which must have the same name, a second directory of a checkpoint. It stays
    when the first is removed. Raises CheckpointError as :func:`link_rows`."""
    try:
        to.mkdir(parents=True)
        for path in checkpoint.iterdir():
            _link(path, to / path.name)
    except OSError as error:
        raise CheckpointError(
            f"{to} cannot be written: {disk_reason(error)}", code=disk_code(error)
        ) from error


def _link(path: Path, to: Path) -> None:
    try:
        try:
            DISK.link(path, to)
        except OSError:
            shutil.copyfile(path, to)
    except OSError as error:
        raise CheckpointError(
            f"{to} cannot be written: {disk_reason(error)}", code=disk_code(error)
        ) from error


def write_rows(
    checkpoint: Path,
    manifest: Manifest,
    file: ManifestFile,
    states: Mapping[str, TableState],
    to: Path,
    *,
    keep_slots: bool,
) -> ManifestFile:
    """Writes the rows of one shard into ``to``, the directory of a changed copy of a checkpoint;
    evicted rows stay the same. Returns the shard's entry for the manifest of the copy.

    Args:
        checkpoint: the checkpoint that is copied. ``manifest`` is its manifest, ``file`` the entry
            of the shard in it.
        states: rows of the plan's tables by name, of any job and number of shards; other tables
            have none.
        keep_slots: whether rows keep their optimizer slots, where the table's optimizer is the
            same. Other slots get their initial values.

    Raises:
        CheckpointError: a file cannot be read, or written.
    """
    plan, (last, *_) = manifest.plan, reversed(file.rows)
    with RowsReader(checkpoint / last.name, last.nbytes, last.sha256) as reader:
        widths = reader.header.slots
    rows = [
        _of_shard(spec, slots, states.get(spec.name), file.shard, plan.row_shards, keep_slots)
        for spec, slots in zip(plan.tables, widths, strict=True)
    ]
    header = RowsHeader(
        shard=file.shard,
        shards=plan.shards,
        plan_hash=plan.hash.hex(),
        run_id=manifest.run_id,
        generation=manifest.generation,
        global_step=manifest.global_step,
        version=file.version,
        part=0,
        after="",
        tables=plan.tables,
        slots=widths,
        rows=[table.rows for table in rows],
    )
    written = write_rows_file(to / rows_file_name(file.shard, plan.shards, 0), header, rows)
    link_rows(checkpoint, replace(file, rows=()), to)
    return replace(file, rows=(RowsFileEntry(written.name, written.nbytes, written.sha256),))


def _of_shard(
    spec: TableSpec,
    slots: Mapping[str, int],
    state: TableState | None,
    shard: int,
    shards: int,
    keep_slots: bool,
) -> TableRows:
    if state is None:
        return TableRows(spec, 0, slots, partial(_read, {}, np.zeros(0, np.int64)))
    rows, candidates = state.rows, state.candidates
    at = np.flatnonzero(shard_of(rows.ids, shards) == np.uint64(shard))
    columns: dict[str, NDArray | tuple[float, int]] = {
        name: getattr(rows, name) for name in ("ids", "values", "counts", "touched")
    }
    goes_on = keep_slots and optimizer_kind(state.spec) == optimizer_kind(spec)
    first = make_row_rule(spec).slots
    for name, width in slots.items():
        columns[f"slot/{name}"] = rows.slots[name] if goes_on else (first[name], width)
    own = shard_of(candidates.ids, shards) == np.uint64(shard)
    return TableRows(
        spec,
        len(at),
        slots,
        partial(_read, columns, at),
        candidates=(candidates.ids[own], candidates.counts[own], candidates.touched[own]),
    )


def _read(
    columns: Mapping[str, NDArray | tuple[float, int]],
    at: NDArray,
    column: str,
    start: int,
    stop: int,
) -> NDArray:
    """Returns rows ``at[start:stop]`` of a column. It is an array, or a value and a width: then
    each element has this value."""
    found = columns[column]
    if isinstance(found, tuple):
        return np.full((stop - start, found[1]), found[0], np.float32)
    return found[at[start:stop]]
