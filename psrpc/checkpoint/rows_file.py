"""One part of a shard's rows in a checkpoint: safetensors beside the file of its arenas.

Part 0 has all rows of all tables of the shard. Part N > 0 has the rows that were touched since part
N - 1, and the ids that were removed since then.

A table NAME has the tensors ``table/NAME/ids``, ``/values``, ``/slot/SLOT``, ``/counts`` and
``/touched``, with one entry per row; ``/removed``, the ids to remove before the part's rows are
inserted; and ``/candidates/ids``, ``/candidates/counts`` and ``/candidates/touched``, which every
part contains completely. Tensor names are labels and never parsed; the metadata describes the
contents. All of this is load-bearing. :mod:`psrpc.checkpoint.rows_reader` reads the files.

``counts`` and ``touched`` decide which rows and candidates make room for others, so a restored
table evicts what it would have evicted anyway. Format 1 lacks ``/candidates/touched``.

A file of evicted rows has the same form, that of a part 0; :mod:`psrpc.checkpoint.evicted_file`
reads it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.checkpoint.safetensors_form import Placed, header_bytes
from psrpc.checkpoint.shard_file import NDArray, WrittenFile, array_bytes
from psrpc.core.document import anything, listed, mapped, record, text, whole
from psrpc.core.errors import CheckpointError, disk_code
from psrpc.core.tables import MAX_WIDTH, Ids, TableSpec
from psrpc.files.storage import DISK, Storage

FORMAT = 2

UNTOUCHED_CANDIDATES = 1
"""The older format, which is still read."""

WRITE_NBYTES = 1 << 20
"""Bytes of one column per read, which takes a millisecond under a lock."""

Counts = npt.NDArray[np.uint32]


def _no_ids() -> Ids:
    return np.zeros(0, np.int64)


def _no_candidates() -> tuple[Ids, Counts, Counts]:
    return _no_ids(), np.zeros(0, np.uint32), np.zeros(0, np.uint32)


@dataclass(frozen=True)
class TableRows:
    """The rows of one table that go into a part.

    Attributes:
        rows: number of rows.
        slots: the table's optimizer slots and their widths.
        read: ``read(column, start, stop)`` returns rows ``[start, stop)`` of ``ids``, ``values``,
            ``slot/SLOT``, ``counts`` or ``touched``, with the dtype and shape in
            :func:`columns_of`. All columns have the same order of rows. It may block, and may raise
            CheckpointError.
        removed: ids to remove first.
        candidates: ids that have been counted and have no row, their counts, and the version that
            named each last.
    """

    spec: TableSpec
    rows: int
    slots: Mapping[str, int]
    read: Callable[[str, int, int], NDArray]
    removed: Ids = field(default_factory=_no_ids)
    candidates: tuple[Ids, Counts, Counts] = field(default_factory=_no_candidates)


@dataclass(frozen=True)
class RowsHeader:
    """The metadata of a part.

    ``after`` is the SHA-256 of the previous part, empty in part 0. ``tables`` are the specs of all
    tables, ``slots`` the widths of the slots of each, and ``rows`` the number of rows of each on
    the shard, including those of earlier parts. ``format`` is the format of the file."""

    shard: int
    shards: int
    plan_hash: str
    run_id: str
    generation: int
    global_step: int
    version: int
    part: int
    after: str
    tables: Sequence[TableSpec]
    slots: Sequence[Mapping[str, int]]
    rows: Sequence[int]
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON types."""
        return {
            **vars(self),
            "tables": [table.to_json() for table in self.tables],
            "slots": [dict(slots) for slots in self.slots],
            "rows": list(self.rows),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> RowsHeader:
        """The inverse of :meth:`to_json`. Raises ValueError, which names the field."""
        found = dict(_HEADER(document, "its header"))
        found["tables"] = tuple(TableSpec.from_json(table) for table in found["tables"])
        if not len(found["tables"]) == len(found["slots"]) == len(found["rows"]):
            raise ValueError("tables, slots and rows are not of the same number")
        if len({table.name for table in found["tables"]}) != len(found["tables"]):
            raise ValueError("two of its tables have one name")
        return RowsHeader(**found)


_HEADER = record(
    {
        "format": whole(UNTOUCHED_CANDIDATES, FORMAT),
        "shard": whole(),
        "shards": whole(),
        "plan_hash": text,
        "run_id": text,
        "generation": whole(),
        "global_step": whole(),
        "version": whole(),
        "part": whole(),
        "after": text,
        "tables": listed(anything),
        "slots": listed(mapped(whole(1, MAX_WIDTH))),
        "rows": listed(whole()),
    }
)


def rows_file_name(shard: int, shards: int, part: int) -> str:
    """Returns the name of a part within its checkpoint."""
    return f"rows-{shard}-of-{shards}-{part}.safetensors"


def evicted_file_name(shard: int, shards: int) -> str:
    """Returns the name of the file of evicted rows within its checkpoint."""
    return f"evicted-{shard}-of-{shards}.safetensors"


def columns_of(spec: TableSpec, slots: Mapping[str, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns a table's columns in the order of the file: name -> dtype and shape of one row."""
    return {
        "ids": ("int64", ()),
        "values": ("float32", (spec.width,)),
        **{f"slot/{name}": ("float32", (width,)) for name, width in slots.items()},
        "counts": ("uint32", ()),
        "touched": ("uint32", ()),
    }


def candidate_columns(format_: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the columns of candidates in a file of this format, in the form of
    :func:`columns_of`."""
    columns: dict[str, tuple[str, tuple[int, ...]]] = {
        "candidates/ids": ("int64", ()),
        "candidates/counts": ("uint32", ()),
        "candidates/touched": ("uint32", ()),
    }
    if format_ == UNTOUCHED_CANDIDATES:
        del columns["candidates/touched"]
    return columns


def row_nbytes(spec: TableSpec, slots: Mapping[str, int]) -> int:
    """Returns the bytes of one row, over all columns."""
    return sum(
        Placed(name, dtype, shape).nbytes
        for name, (dtype, shape) in columns_of(spec, slots).items()
    )


def tensor_name(table: str, column: str) -> str:
    """Returns the name of the tensor for a column of a table."""
    return f"table/{table}/{column}"


def write_rows_file(
    path: Path, header: RowsHeader, tables: Sequence[TableRows], storage: Storage = DISK
) -> WrittenFile:
    """Writes the part, then syncs it and its directory to disk. Reads rows in blocks, column by
    column, and has one block in memory at a time.

    Args:
        tables: in the order of ``header.tables``.

    Raises:
        CheckpointError: the operating system refused, or rows could not be read; a partial file may
            remain.
    """
    tensors = _tensors(tables)
    head = header_bytes(header.to_json(), (placed for placed, _ in tensors))
    blocks = (array_bytes(block) for _, read in tensors for block in read())
    try:
        written = storage.write(path, itertools.chain([head], blocks))
        storage.sync(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}", code=disk_code(error)
        ) from error
    return WrittenFile(path.name, written.nbytes, written.sha256)


def _tensors(tables: Sequence[TableRows]) -> list[tuple[Placed, Callable[[], Iterator[NDArray]]]]:
    """Returns every tensor with its reader. Tensors with wide elements come first, so that each
    tensor is aligned."""
    found: list[tuple[Placed, Callable[[], Iterator[NDArray]]]] = []
    for table in tables:
        name = table.spec.name
        for column, (dtype, shape) in columns_of(table.spec, table.slots).items():
            placed = Placed(tensor_name(name, column), dtype, (table.rows, *shape))
            found.append((placed, partial(_blocks, table, column, dtype, shape)))
        ids, counts, touched = table.candidates
        for column, array in (
            ("removed", np.asarray(table.removed, np.int64)),
            ("candidates/ids", np.asarray(ids, np.int64)),
            ("candidates/counts", np.asarray(counts, np.uint32)),
            ("candidates/touched", np.asarray(touched, np.uint32)),
        ):
            placed = Placed(tensor_name(name, column), array.dtype.name, array.shape)
            found.append((placed, partial(iter, (array,))))
    return sorted(found, key=lambda item: -np.dtype(item[0].dtype).itemsize)


def _blocks(table: TableRows, column: str, dtype: str, shape: tuple[int, ...]) -> Iterator[NDArray]:
    step = max(1, WRITE_NBYTES // Placed(column, dtype, shape).nbytes)
    for start in range(0, table.rows, step):
        stop = min(start + step, table.rows)
        block = table.read(column, start, stop)
        # The header that announces this block is written already.
        assert (block.dtype.name, block.shape) == (dtype, (stop - start, *shape)), column
        yield block
