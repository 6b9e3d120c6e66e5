"""``coordinator export --tables``: each embedding table of a checkpoint as a file of ids and rows.

A file is safetensors with the tensors ``ids`` int64 ``[n]``, ascending, and ``rows`` float32
``[n, width]``. Unlike .npz it can be mapped into memory, and written without holding the table.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from psrpc.errors import CheckpointError, disk_code
from psrpc.manifest import Manifest
from psrpc.rows_chain import fill_rows, table_ids
from psrpc.safetensors_form import Placed, header_bytes
from psrpc.tables import Ids, TableSpec


@dataclass(frozen=True)
class ExportedTable:
    """A table's file."""

    name: str
    path: Path
    rows: int
    width: int


def table_file_name(table: str) -> str:
    """The name of a table's file; what a file's name may not have is percent-encoded."""
    return f"{quote(table, safe='')}.safetensors"


def export_tables(directory: Path, manifest: Manifest, to: Path) -> list[ExportedTable]:
    """Writes all tables of a checkpoint into the directory ``to``, over what is there of the same
    names. About 30 bytes are held for each row of a table, whatever its width.

    Raises:
        CheckpointError: it has no tables, its files are damaged, or the operating system refused.
    """
    if not manifest.plan.tables:
        raise CheckpointError(f"{directory} has no embedding tables")
    found = []
    for spec in manifest.plan.tables:
        path = to / table_file_name(spec.name)
        partial = path.with_name(f".{path.name}.partial")
        try:
            to.mkdir(parents=True, exist_ok=True)
            rows = _write(directory, manifest, spec, partial)
            partial.replace(path)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror}", code=disk_code(error)
            ) from error
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        found.append(ExportedTable(spec.name, path, rows, spec.width))
    return found


def _write(directory: Path, manifest: Manifest, spec: TableSpec, path: Path) -> int:
    ids: Ids = table_ids(directory, spec.name)
    tensors = [
        Placed("ids", "int64", ids.shape),
        Placed("rows", "float32", (ids.size, spec.width)),
    ]
    metadata = {
        "table": spec.to_json(),
        "run_id": manifest.run_id,
        "checkpoint": manifest.name,
        "global_step": manifest.global_step,
    }
    head = header_bytes(metadata, tensors)
    with path.open("w+b") as file:
        file.write(head)
        file.write(ids.data)
        # At once, so that a disk that is too small is found here and not while it is mapped.
        os.posix_fallocate(file.fileno(), 0, len(head) + sum(t.nbytes for t in tensors))
        file.flush()
        if ids.size:
            at = len(head) + tensors[0].nbytes
            into = np.memmap(file, np.float32, "r+", at, (ids.size, spec.width))
            fill_rows(directory, spec.name, ids, into)
            into.flush()
        os.fsync(file.fileno())
    return ids.size
