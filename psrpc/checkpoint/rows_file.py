"""One part of a shard's rows in a checkpoint: safetensors beside the file of its arenas.

Part 0 holds all rows of all tables of the shard, part N > 0 those that were touched since part
N - 1, and the ids that were removed since. Of table NAME there are the tensors ``table/NAME/ids``,
``/values``, ``/slot/SLOT``, ``/counts`` and ``/touched``, one row each; ``/removed`` (ids that are
to be taken out before the part's rows are put in); ``/candidates/ids``, ``/candidates/counts`` and
``/candidates/touched``, whole in every part. Names are labels and never parsed; what there is
stands in the metadata. All of it is load-bearing. :mod:`psrpc.checkpoint.rows_reader` reads them.

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
"""Bytes of one column per read: a millisecond of work under a lock."""

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
        read: ``read(column, start, stop)`` gives rows ``[start, stop)`` of ``ids``, ``values``,
            ``slot/SLOT``, ``counts`` or ``touched``, in the form that :func:`columns_of` has for
            it. Always in the same order. It may wait, and may raise CheckpointError.
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
    """The metadata of a part. ``after`` is the SHA-256 of the part before it, empty of part 0;
    ``tables`` are the specs of all tables, ``slots`` the widths of each one's slots, ``rows`` how
    many rows each has on the shard, those of earlier parts with them. ``format`` is what the file
    is, or will be, written in."""

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
        """Plain JSON types."""
        return {
            **vars(self),
            "tables": [table.to_json() for table in self.tables],
            "slots": [dict(slots) for slots in self.slots],
            "rows": list(self.rows),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> RowsHeader:
        """The inverse of :meth:`to_json`. Raises ValueError; names the field."""
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
    """The name of a part within its checkpoint."""
    return f"rows-{shard}-of-{shards}-{part}.safetensors"


def evicted_file_name(shard: int, shards: int) -> str:
    """The name of the file of evicted rows within its checkpoint."""
    return f"evicted-{shard}-of-{shards}.safetensors"


def columns_of(spec: TableSpec, slots: Mapping[str, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A table's columns in the order of the file: name -> dtype, and the shape of one row."""
    return {
        "ids": ("int64", ()),
        "values": ("float32", (spec.width,)),
        **{f"slot/{name}": ("float32", (width,)) for name, width in slots.items()},
        "counts": ("uint32", ()),
        "touched": ("uint32", ()),
    }


def candidate_columns(format_: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The columns of candidates in a file of this format, as :func:`columns_of`."""
    columns: dict[str, tuple[str, tuple[int, ...]]] = {
        "candidates/ids": ("int64", ()),
        "candidates/counts": ("uint32", ()),
        "candidates/touched": ("uint32", ()),
    }
    if format_ == UNTOUCHED_CANDIDATES:
        del columns["candidates/touched"]
    return columns


def row_nbytes(spec: TableSpec, slots: Mapping[str, int]) -> int:
    """Bytes of one row in all columns."""
    return sum(
        Placed(name, dtype, shape).nbytes
        for name, (dtype, shape) in columns_of(spec, slots).items()
    )


def tensor_name(table: str, column: str) -> str:
    """The name of a table's tensor."""
    return f"table/{table}/{column}"


def write_rows_file(
    path: Path, header: RowsHeader, tables: Sequence[TableRows], storage: Storage = DISK
) -> WrittenFile:
    """Writes and fsyncs the part and then its directory. Reads rows in blocks, column by column,
    and holds one block at a time.

    Args:
        tables: in the order of ``header.tables``.

    Raises:
        CheckpointError: the operating system refused, or rows could not be read; the file may be
            there in part.
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
    """Yields every tensor and its reader; wide elements first, so that each tensor is aligned."""
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
        # The header is written already, so nothing else may follow.
        assert (block.dtype.name, block.shape) == (dtype, (stop - start, *shape)), column
        yield block
