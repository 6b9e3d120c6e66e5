"""Stores batches ``(x, y)`` or ``(x, y, sample_weight)`` in a directory, one column per array."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from psrpc.core.errors import InvalidData, PsError
from worker.data.arrays import Arrays
from worker.data.ragged import Ragged
from worker.data.source import Batch, named_arrays
from worker.stored.columns import ColumnWriter, decoded, is_text, open_column

_PART_NAMES = ("x", "y", "sample_weight")
KEPT_FREE_NBYTES = 256 << 20
"""Room on the disk that data never takes: checkpoints and logs need it."""


class RecordsWriter:
    """Writes batches of equal form into one column for each of their arrays.

    Args:
        folder: where the files go; it has none yet.
        like: the first batch, or all records.
        dtype: returns the dtype of a column in its file.
        once: whether ``like`` has all records. If so, an array that it contains twice is stored
            once.
    """

    def __init__(
        self,
        folder: Path,
        like: Batch,
        dtype: Callable[[np.dtype[Any]], np.dtype[Any]],
        *,
        once: bool = False,
    ) -> None:
        self._folder = folder
        self._like = like
        self._forms = {name: _form(array) for name, array in _named(like)}
        self._columns: dict[str, ColumnWriter] = {}
        self.expected_nbytes = 0
        """Size of ``like`` in the files, without its strings."""
        same: dict[Any, ColumnWriter] = {}
        for index, (name, array) in enumerate(_named(like)):
            place = _memory(array) if once else index
            if place not in same:
                stored = dtype(array.dtype)
                same[place] = ColumnWriter(folder, index, array, stored)
                if not is_text(stored):
                    self.expected_nbytes += _size(array) * stored.itemsize
            self._columns[name] = same[place]

    def append(self, batch: Batch, producer: str) -> None:
        """Writes more records. ``producer`` made them, for messages.

        Raises:
            InvalidData: their form is not that of the first batch.
            PsError: PS502, PS503 or PS504, from the disk.
        """
        arrays = dict(_named(batch))
        if arrays.keys() != self._forms.keys():
            raise InvalidData(
                f"{producer} has {', '.join(arrays)}, and the first one "
                f"{', '.join(self._forms)}; expected batches of one structure"
            )
        written = set()
        for name, array in arrays.items():
            if (form := _form(array)) != self._forms[name]:
                raise InvalidData(
                    f"{name} of {producer} is {form}, and that of the first one "
                    f"{self._forms[name]}; expected records of one shape and dtype: pad all to one "
                    "length (padded_shapes=), or make them ragged (.ragged_batch(n))"
                )
            column = self._columns[name]
            if id(column) not in written:
                column.append(array)
                written.add(id(column))

    @property
    def nbytes(self) -> int:
        """Size of the records so far."""
        return sum(column.nbytes for column in self._distinct())

    def complete(self) -> list[Any]:
        """Completes the files; returns the JSON-able description for :func:`open_records`."""
        for column in self._distinct():
            column.complete()
        columns = iter([column.description for column in self._columns.values()])
        return [_described(part, columns) for part in self._like]

    def close(self) -> None:
        """Closes the files, completed or not."""
        for column in self._distinct():
            column.close()

    def _distinct(self) -> Iterable[ColumnWriter]:
        return {id(column): column for column in self._columns.values()}.values()


def check_disk(folder: Path, nbytes: int) -> None:
    """Refuses ``nbytes`` more than the disk of ``folder`` has room for.

    Raises:
        PsError: PS502, with both sizes.
    """
    free = shutil.disk_usage(folder).free
    if nbytes > free - KEPT_FREE_NBYTES:
        raise PsError(
            f"the data takes {in_units(nbytes)}, and the disk of {str(folder)!r} has "
            f"{in_units(free)} free, of which {in_units(KEPT_FREE_NBYTES)} stay; make room there, "
            "or choose another run directory",
            code="PS502",
        )


def in_units(nbytes: int) -> str:
    """Formats a size, as ``"1.5 GB"``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def open_records(folder: Path, parts: list[Any]) -> Arrays:
    """Returns the records whose description is ``parts``, on memory maps.

    Raises:
        InvalidData: a file is gone or torn.
    """
    opened = [_opened(folder, part) for part in parts]

    def decode(*batch: Any) -> Batch:
        return tuple(_decoded(part, nest) for part, nest in zip(parts, batch, strict=True))

    return Arrays(*opened, map=decode)


def _named(batch: Batch) -> Iterator[tuple[str, Any]]:
    for name, nest in zip(_PART_NAMES, batch, strict=False):
        yield from named_arrays(name, nest)


def _form(array: Any) -> str:
    shape = ", ".join(["n", *("None" if each is None else str(each) for each in array.shape[1:])])
    return f"[{shape}] of {'strings' if is_text(array.dtype) else array.dtype}"


def _size(array: Any) -> int:
    return int(array.values.size + len(array) if isinstance(array, Ragged) else array.size)


def _memory(array: Any) -> Any:
    """Returns a key that two arrays share if they are the same values in the same memory."""
    if isinstance(array, Ragged):
        return _memory(array.values), _memory(array.row_splits)
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str


def _described(nest: Any, columns: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Returns a nest as ``{"dict": {...}}``, ``{"list": [...]}``, ``{"tuple": [...]}``, and its
    arrays as their columns."""
    if isinstance(nest, dict):
        return {"dict": {key: _described(each, columns) for key, each in nest.items()}}
    if isinstance(nest, list | tuple):
        kind = "list" if isinstance(nest, list) else "tuple"
        return {kind: [_described(each, columns) for each in nest]}
    return next(columns)


def _opened(folder: Path, part: dict[str, Any]) -> Any:
    if "dict" in part:
        return {key: _opened(folder, each) for key, each in part["dict"].items()}
    if "list" in part:
        return [_opened(folder, each) for each in part["list"]]
    if "tuple" in part:
        return tuple(_opened(folder, each) for each in part["tuple"])
    return open_column(folder, part)


def _decoded(part: dict[str, Any], nest: Any) -> Any:
    """Returns a batch's nest with its strings decoded."""
    if "dict" in part:
        return {key: _decoded(each, nest[key]) for key, each in part["dict"].items()}
    if "list" in part or "tuple" in part:
        inner = part["list"] if "list" in part else part["tuple"]
        return type(nest)([_decoded(each, one) for each, one in zip(inner, nest, strict=True)])
    return decoded(nest, part["text"]) if "text" in part else nest
