"""``coordinator export --tables`` and ``--evicted``: writes the rows of each embedding table of a
checkpoint, or its evicted rows, as a file of ids and rows, and all other variables as a file.

Files are safetensors. A table's has the tensors ``ids`` int64 ``[n]``, ascending, and ``rows``
float32 ``[n, width]``; the other has a tensor for each variable, by its path and in its shape.
Unlike .npz, these files can be mapped into memory, and a table is written without holding it there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coordinator.checkpoints.evicted import evicted_of
from psrpc.checkpoint.checkpoint import exported_variables
from psrpc.checkpoint.evicted_file import evicted_ids, fill_evicted
from psrpc.checkpoint.manifest import Manifest
from psrpc.checkpoint.rows_chain import fill_rows, table_ids
from psrpc.checkpoint.safetensors_form import Placed, header_bytes
from psrpc.checkpoint.table_file import TableValues, placed_whole, write_table_file
from psrpc.core.errors import InvalidArgument
from psrpc.core.tables import Ids, TableSpec

VARIABLES = "model.safetensors"
"""The file of the variables that are not tables. Load-bearing."""

Fill = Callable[[str, Ids, TableValues], None]
"""Writes the rows of the table of that name into an array, in the order of the ids."""


@dataclass(frozen=True)
class ExportedTable:
    """A table's file."""

    name: str
    path: Path
    rows: int
    width: int


@dataclass(frozen=True)
class ExportedVariables:
    """The file of all variables that are not tables; counts them and their elements."""

    path: Path
    variables: int
    elements: int


def table_file_name(table: str) -> str:
    """Returns the name of a table's file, percent-encoding invalid characters."""
    name = f"{quote(table, safe='')}.safetensors"
    # VARIABLES is taken; programs that decode names read this one like the others.
    return name if name != VARIABLES else f"%6D{name[1:]}"


def export_tables(directory: Path, manifest: Manifest, to: Path) -> list[ExportedTable]:
    """Writes all tables of a checkpoint into the directory ``to``, replacing files of the same
    names. Needs about 30 bytes of memory for each row of a table, whatever its width.

    Raises:
        CheckpointError: its files are damaged, or the operating system refused.
    """

    def fill(table: str, ids: Ids, into: TableValues) -> None:
        fill_rows(directory, table, ids, into)

    return _export(manifest, manifest.plan.tables, to, partial(table_ids, directory), fill)


def export_variables(directory: Path, manifest: Manifest, to: Path) -> ExportedVariables:
    """Writes the variables of a checkpoint that are not tables into the directory ``to``, replacing
    a file of that name. Moving averages replace the parameters that have them. Holds all values in
    memory at once.

    Raises:
        CheckpointError: its files are damaged, or the operating system refused.
    """
    values = exported_variables(directory, manifest)
    tensors = [Placed(name, array.dtype.name, array.shape) for name, array in values.items()]
    path = to / VARIABLES
    with placed_whole(path) as unfinished, unfinished.open("wb") as file:
        file.write(header_bytes(_origin(manifest), tensors))
        for array in values.values():
            file.write(array.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return ExportedVariables(path, len(tensors), sum(tensor.size for tensor in tensors))


def export_evicted(
    directory: Path, manifest: Manifest, to: Path
) -> tuple[list[ExportedTable], list[str]]:
    """Writes, as :func:`export_tables`, all rows evicted before the checkpoint from tables that
    keep them; of a row evicted several times, the last. Also returns remarks on skipped files.

    Raises:
        InvalidArgument: no table keeps evicted rows.
        CheckpointError: files are damaged, or the operating system refused.
    """
    tables = [table for table in manifest.plan.tables if table.keep_evicted]
    if not tables:
        raise InvalidArgument(
            f"--evicted {to}: {directory} has no embedding table that keeps evicted rows; a job's "
            "tables do with worker.Embedding(..., keep_evicted=True)"
        )
    sources, remarks = evicted_of(directory.absolute(), manifest)

    def fill(table: str, ids: Ids, into: TableValues) -> None:
        fill_evicted(sources, table, ids, into)

    exported = _export(manifest, tables, to, partial(evicted_ids, sources), fill)
    return exported, remarks


def _export(
    manifest: Manifest,
    tables: Iterable[TableSpec],
    to: Path,
    ids_of: Callable[[str], Ids],
    fill: Fill,
) -> list[ExportedTable]:
    found = []
    for spec in tables:
        path, ids = to / table_file_name(spec.name), ids_of(spec.name)
        write_table_file(path, spec, _origin(manifest), ids, partial(fill, spec.name, ids))
        found.append(ExportedTable(spec.name, path, ids.size, spec.width))
    return found


def _origin(manifest: Manifest) -> dict[str, Any]:
    return {
        "run_id": manifest.run_id,
        "checkpoint": manifest.name,
        "global_step": manifest.global_step,
    }
