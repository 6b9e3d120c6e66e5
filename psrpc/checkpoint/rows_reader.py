"""Reads one part of a shard's rows twice: first completely, to compare it with the manifest, then
in blocks.

Two passes are needed because a part may be larger than memory, and because its columns lie one
after the other, so that a block of rows is read from many places. The first pass also records a
checksum of each piece that the second pass reads. So every block has the same bytes that were
compared with the manifest.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psrpc.checkpoint.rows_file import (
    Counts,
    RowsHeader,
    candidate_columns,
    columns_of,
    row_nbytes,
    tensor_name,
)
from psrpc.checkpoint.safetensors_form import Placed, header_length, parse_safetensors_header
from psrpc.checkpoint.shard_file import NDArray
from psrpc.core.errors import CheckpointError
from psrpc.core.tables import Ids
from psrpc.files.storage import DISK, Storage

READ_NBYTES = 1 << 22
"""Size of a block of rows, over all columns."""


@dataclass(frozen=True)
class RowsBlock:
    """Rows of one table, in the order of a part: ``ids`` int64 ``[n]``, unsorted, ``values``
    float32 ``[n, width]``, ``slots`` name -> float32 ``[n, slot's width]``, ``counts`` and
    ``touched`` uint32 ``[n]``. Owns its arrays."""

    ids: Ids
    values: npt.NDArray[np.float32]
    slots: Mapping[str, npt.NDArray[np.float32]]
    counts: Counts
    touched: Counts

    def chosen(self, where: npt.NDArray[np.bool_]) -> RowsBlock:
        """Selects the rows for which ``where`` bool ``[n]`` is true."""
        if where.all():
            return self
        slots = {name: array[where] for name, array in self.slots.items()}
        return RowsBlock(
            self.ids[where], self.values[where], slots, self.counts[where], self.touched[where]
        )


class RowsReader:
    """An open part, and a context manager. Call :meth:`check` before reading blocks."""

    def __init__(self, path: Path, nbytes: int, sha256: str, storage: Storage = DISK) -> None:
        """Opens the file and reads its header. ``nbytes`` and ``sha256`` are those in the manifest.

        Raises:
            CheckpointError: the file is missing, has another size, or is not of this format.
        """
        self.path = path
        self._sha256 = sha256
        self._sums: dict[str, list[int]] = {}
        """Tensor -> the CRC-32 of each of its pieces; empty before :meth:`check`."""
        try:
            self._file = storage.open(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        try:
            self._open(nbytes)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RowsReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def check(self) -> None:
        """Reads the whole file and compares it with the manifest.

        Raises:
            CheckpointError: the file is not as the manifest says.
        """
        digest = hashlib.sha256()
        digest.update(self._read(0, self._data))
        sums: dict[str, list[int]] = {}
        for tensor in self._tensors.values():
            pieces = sums.setdefault(tensor.name, [])
            step = self._step_nbytes[tensor.name]
            for at in range(tensor.start, tensor.start + tensor.nbytes, step):
                count = min(step, tensor.start + tensor.nbytes - at)
                piece = self._read(self._data + at, count)
                digest.update(piece)
                pieces.append(zlib.crc32(piece))
        found = digest.hexdigest()
        if found != self._sha256:
            raise CheckpointError(f"{self.path} has SHA-256 {found}; expected {self._sha256}")
        self._sums = sums

    def rows(self, table: int) -> int:
        """Number of rows of a table."""
        return self._of(table, "ids").size

    def blocks(self, table: int) -> Iterator[RowsBlock]:
        """Yields all rows of a table, in blocks of about READ_NBYTES. Only after :meth:`check`.

        Raises:
            CheckpointError: the file cannot be read, or has changed since :meth:`check`.
        """
        slots = self.header.slots[table]
        for block in range(self._count(table, "ids")):
            yield RowsBlock(
                self._piece(table, "ids", block),
                self._piece(table, "values", block),
                {name: self._piece(table, f"slot/{name}", block) for name in slots},
                self._piece(table, "counts", block),
                self._piece(table, "touched", block),
            )

    def ids(self, table: int) -> Iterator[Ids]:
        """Yields only the ids of :meth:`blocks`."""
        for block in range(self._count(table, "ids")):
            yield self._piece(table, "ids", block)

    def removed(self, table: int) -> Iterator[Ids]:
        """Yields the ids to remove before these rows are inserted, in blocks as :meth:`blocks`."""
        for block in range(self._count(table, "removed")):
            yield self._piece(table, "removed", block)

    def candidates(self, table: int) -> Iterator[tuple[Ids, Counts, Counts]]:
        """Yields candidates in blocks as :meth:`blocks`: ids with a count and no row, their
        counts, and the version that named each last (0 in a file of the older format)."""
        known = "candidates/touched" in candidate_columns(self.header.format)
        for block in range(self._count(table, "candidates/ids")):
            counts = self._piece(table, "candidates/counts", block)
            yield (
                self._piece(table, "candidates/ids", block),
                counts,
                self._piece(table, "candidates/touched", block) if known else np.zeros_like(counts),
            )

    def _open(self, nbytes: int) -> None:
        try:
            found = self._file.seek(0, 2)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        if found != nbytes:
            raise CheckpointError(f"{self.path} has {found} bytes; expected {nbytes}")
        try:
            length = header_length(self._read(0, min(8, nbytes)), nbytes)
            self._data = 8 + length
            metadata, placed = parse_safetensors_header(
                bytes(self._read(8, length)), nbytes - self._data
            )
            self.header = RowsHeader.from_json(metadata)
            self._tensors = {tensor.name: tensor for tensor in placed}
            self._step_nbytes = self._steps()
        except ValueError as error:
            raise CheckpointError(f"{self.path} is not a file of rows: {error}") from error

    def _steps(self) -> dict[str, int]:
        """Returns the bytes per piece of each tensor. Pieces of all columns of a table have the
        same number of rows.

        Raises:
            ValueError: the tensors are not those of the header.
        """
        steps: dict[str, int] = {}
        for spec, slots in zip(self.header.tables, self.header.slots, strict=True):
            nbytes = row_nbytes(spec, slots)
            groups: list[tuple[int, Mapping[str, tuple[str, tuple[int, ...]]]]] = [
                (nbytes, columns_of(spec, slots)),
                (8, {"removed": ("int64", ())}),
                (16, candidate_columns(self.header.format)),
            ]
            for each, columns in groups:
                rows: int | None = None
                for column, (dtype, shape) in columns.items():
                    tensor = self._tensors.get(tensor_name(spec.name, column))
                    if tensor is None or tensor.name in steps:
                        raise ValueError(f"table {spec.name!r} has no {column} of its own")
                    if rows is None:
                        rows = next(iter(tensor.shape), 0)
                    if (tensor.dtype, tensor.shape) != (dtype, (rows, *shape)):
                        raise ValueError(f"tensor {tensor.name!r} is {tensor.dtype}{tensor.shape}")
                    one = Placed(column, dtype, shape).nbytes
                    steps[tensor.name] = max(1, READ_NBYTES // each) * one
        if steps.keys() != self._tensors.keys():
            raise ValueError(f"tensors {sorted(self._tensors.keys() - steps.keys())} are unknown")
        return steps

    def _of(self, table: int, column: str) -> Placed:
        return self._tensors[tensor_name(self.header.tables[table].name, column)]

    def _count(self, table: int, column: str) -> int:
        tensor = self._of(table, column)
        return -(-tensor.nbytes // self._step_nbytes[tensor.name])

    def _piece(self, table: int, column: str, number: int) -> NDArray:
        tensor = self._of(table, column)
        step = self._step_nbytes[tensor.name]
        start = number * step
        data = self._read(self._data + tensor.start + start, min(step, tensor.nbytes - start))
        if zlib.crc32(data) != self._sums[tensor.name][number]:
            raise CheckpointError(f"{self.path} has changed while it was read")
        return np.frombuffer(data, tensor.dtype).reshape(-1, *tensor.shape[1:])

    def _read(self, at: int, count: int) -> bytearray:
        buffer = bytearray(count)
        view = memoryview(buffer)
        try:
            self._file.seek(at)
            while view:
                got = self._file.readinto(view)
                if not got:
                    raise CheckpointError(f"{self.path} ends too soon")
                view = view[got:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        return buffer
