"""The file of one exported embedding table, for programs and processes that map it into memory.

It is safetensors, with the tensors ``ids`` int64 ``[n]``, ascending, and ``rows`` float32 ``[n,
width]``. Load-bearing: ``coordinator export --tables`` writes this format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.checkpoint.safetensors_form import (
    Placed,
    header_bytes,
    header_length,
    parse_safetensors_header,
)
from psrpc.core.errors import CheckpointError, disk_code, disk_reason
from psrpc.core.tables import Ids, TableSpec

TableValues = npt.NDArray[np.float32]

TABLE = "table"
"""Key of the table's description in the metadata. Load-bearing."""


def write_table_file(
    path: Path,
    spec: TableSpec,
    origin: Mapping[str, Any],
    ids: Ids,
    fill: Callable[[TableValues], None],
) -> None:
    """Writes the file completely or not at all; replaces an existing file.

    Args:
        origin: further metadata, of plain JSON types.
        ids: int64 ``[n]``, ascending.
        fill: called with an array ``[n, width]`` that is mapped from the file; writes the rows into
            it, in the order of ``ids``.

    Raises:
        CheckpointError: the operating system refused.
    """
    tensors = [
        Placed("ids", "int64", ids.shape),
        Placed("rows", "float32", (ids.size, spec.width)),
    ]
    head = header_bytes({TABLE: spec.to_json(), **origin}, tensors)
    with placed_whole(path) as unfinished, unfinished.open("w+b") as file:
        file.write(head)
        file.write(ids.data)
        # Allocates all bytes now, so that a full disk raises an error here and not a signal at a
        # mapped page.
        os.posix_fallocate(file.fileno(), 0, len(head) + sum(t.nbytes for t in tensors))
        file.flush()
        if ids.size:
            at = len(head) + tensors[0].nbytes
            into = np.memmap(file, np.float32, "r+", at, (ids.size, spec.width))
            fill(into)
            into.flush()
        os.fsync(file.fileno())


def map_table_file(path: Path) -> tuple[TableSpec, Ids, TableValues]:
    """Returns the spec, ids and rows of a table file; the arrays are mapped from the file.

    Raises:
        CheckpointError: the file is not a table file, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            length = header_length(file.read(8), nbytes)
            metadata, tensors = parse_safetensors_header(file.read(length), nbytes - 8 - length)
        spec = TableSpec.from_json(metadata[TABLE])
        found = {each.name: (each.dtype, each.shape, 8 + length + each.start) for each in tensors}
        _, (rows,), at = found["ids"]
        if found["ids"][0] != "int64" or found["rows"][:2] != ("float32", (rows, spec.width)):
            raise ValueError(f"its tensors are {found}")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a file of a table: {error}") from error
    if not rows:
        return spec, np.zeros(0, np.int64), np.zeros((0, spec.width), np.float32)
    ids = np.memmap(path, np.int64, "r", at, (rows,))
    return spec, ids, np.memmap(path, np.float32, "r", found["rows"][2], (rows, spec.width))


@contextmanager
def placed_whole(path: Path) -> Iterator[Path]:
    """Makes the parent directory and yields a temporary path. At the end moves the file there to
    ``path``, so that ``path`` is complete or unchanged.

    Raises:
        CheckpointError: the operating system refused.
    """
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {disk_reason(error)}", code=disk_code(error)
        ) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
