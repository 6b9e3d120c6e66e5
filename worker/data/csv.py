"""Records of a CSV file, read by line."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidData, InvalidJob
from psrpc.core.text import counted
from worker.data.files import (
    DataFile,
    Found,
    IndexedSource,
    RecordIndex,
    existing_file,
    hash_files,
)
from worker.data.source import Array, Batch, Map, check_count

Column = str | int
_SCAN_NBYTES = 1 << 24
_NUMBER = re.compile(r"\s*-?[0-9.]+(e[+-]?[0-9]+)?\s*")
_DELIMITERS = (";", "\t", "|", ",")
"""Common delimiters that an error suggests if the job's does not fit."""


class Csv(IndexedSource["_LineIndex"]):
    """Records of a CSV file, one per line; memory holds 8 bytes per record, not the file.

    Args:
        path: the file, or a URL such as ``s3://bucket/data.csv``, read in place (docs/urls.md).
        y: the label column: its name, or its number from 0 in a file without a header.
        x: the input columns, in this order; None means all but ``y``.
        header: whether the first line names the columns.
        delimiter: the text between columns.
        x_dtype, y_dtype: numpy dtypes; ``"str"`` keeps the text.
        map: converts each batch ``x`` ``[n, columns]``, ``y`` ``[n]`` for the model.

    A quoted value must not contain a line break. The reader skips empty lines.

    Raises:
        InvalidJob: on first use: no such file or column; on reading: a line with another number
            of columns, or a value that is not a number; names file, line and column.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        y: Column,
        x: Sequence[Column] | None = None,
        header: bool = True,
        delimiter: str = ",",
        x_dtype: str = "float32",
        y_dtype: str = "int64",
        map: Map | None = None,
    ) -> None:
        super().__init__()
        if isinstance(x, str):
            raise InvalidData(f"Csv: x is {x!r}; expected a list of columns")
        self._path = path
        self._y = y
        self._x = x
        self._header = header
        self._delimiter = delimiter
        self._dtypes = (np.dtype(x_dtype), np.dtype(y_dtype))
        self._map = map

    def record_name(self, seed: int, epoch: int, position: int) -> str:
        """Returns the name, for messages, of the record at a position of an epoch."""
        index = self._opened()
        [(line, _)] = index.lines(index.order.records_at(seed, epoch, position, position + 1))
        return f"line {line} of {str(self._path)!r}"

    def fingerprint(self) -> str:
        path = existing_file("Csv", self._path)
        names = [dtype.str for dtype in self._dtypes]
        return hash_files([path], self._y, self._x, self._header, self._delimiter, names)

    def _open(self) -> _LineIndex:
        index = _LineIndex(existing_file("Csv", self._path), self._header, self._delimiter)
        try:
            self._x_columns, self._y_column = self._columns(index)
        except InvalidJob:
            index.files.close()
            raise
        return index

    def _columns(self, index: _LineIndex) -> tuple[list[int], int]:
        names = index.columns

        def place(column: Column) -> int:
            if isinstance(column, int) and 0 <= column < len(names):
                return column
            if column in names:
                return names.index(str(column))
            shown = ", ".join(names) if self._header else f"0 to {len(names) - 1}"
            raise InvalidData(
                f"Csv: {str(self._path)!r} has no column {column!r}; it has {shown}"
                f"{self._other_delimiter(column, index) or self._no_header(names)}"
            )

        label = place(self._y)
        if self._x is None:
            return [i for i in range(len(names)) if i != label], label
        return [place(column) for column in self._x], label

    def _other_delimiter(self, column: Column, index: _LineIndex) -> str:
        """Returns a hint at a delimiter that splits the first line into more columns, if ``column``
        is then among them or the line is a single column now; else empty."""
        for other in _DELIMITERS:
            split = next(csv.reader([index.first_line], delimiter=other), [])
            there = column in split if self._header else int(column) < len(split)
            if len(split) > len(index.columns) and (there or len(index.columns) == 1):
                return f"; its columns seem to be separated by {other!r}: say delimiter={other!r}"
        return ""

    def _no_header(self, names: Sequence[str]) -> str:
        """Returns a hint that the first line holds data where all its names are numbers."""
        if self._header and all(map(_NUMBER.fullmatch, names)):
            return "; that is a line of data: say header=False, and columns by number"
        return ""

    def _batch(self, index: _LineIndex, records: npt.NDArray[np.int64]) -> Batch:
        lines = index.lines(records)
        rows = list(csv.reader((text for _, text in lines), delimiter=self._delimiter))
        for (line, _), row in zip(lines, rows, strict=True):
            if len(row) != len(index.columns):
                raise InvalidData(
                    f"Csv: {str(self._path)!r} line {line} has {counted(len(row), 'column')}; "
                    f"expected {len(index.columns)}"
                )
        x = self._array(index, lines, rows, self._x_columns, self._dtypes[0])
        y = self._array(index, lines, rows, [self._y_column], self._dtypes[1])[:, 0]
        batch = (x, np.ascontiguousarray(y))
        return batch if self._map is None else check_count("map", self._map(*batch), len(rows))

    def _array(
        self,
        index: _LineIndex,
        lines: list[tuple[int, str]],
        rows: list[list[str]],
        columns: list[int],
        dtype: np.dtype[np.generic],
    ) -> Array:
        """Returns the cells ``[rows, columns]`` as ``dtype``."""
        cells = np.array([[row[column] for column in columns] for row in rows], np.str_)
        try:
            return cells if dtype.kind == "U" else cells.astype(dtype)
        except ValueError:
            for (line, _), values in zip(lines, cells, strict=True):
                for column, value in zip(columns, values, strict=True):
                    try:
                        value.astype(dtype)
                    except ValueError:
                        what = "y_dtype" if column == self._y_column else "x_dtype"
                        raise InvalidData(
                            f"Csv: {str(self._path)!r} line {line} column "
                            f"{index.columns[column]!r} is {str(value)!r}; expected {dtype}"
                            f"{_hint(str(value), what, dtype)}"
                        ) from None
            raise


def _hint(value: str, option: str, dtype: np.dtype[np.generic]) -> str:
    """Returns advice for an empty field, a column of text, or fractions among integers."""
    if not value.strip():
        what = option[0]
        return (
            f"; the field is empty: fill it, leave the line out, or give it a value in map=: with "
            f"{option}='str', {what} = np.where({what} == {value!r}, '0', {what})"
            f".astype({str(dtype)!r})"
        )
    try:
        number = float(value)
    except ValueError:
        return (
            f"; for text say {option}='str', and map= that makes numbers of it, by one list of its "
            "values"
        )
    if dtype.kind in "iu" and math.isfinite(number):
        return f"; for numbers with a fraction say {option}='float32'"
    return ""


class _LineIndex(RecordIndex):
    """The place of each record's line."""

    def __init__(self, found: Found, header: bool, delimiter: str) -> None:
        super().__init__([found])
        self.columns: list[str] = []
        self.first_line = ""
        [file] = self.files.files
        self._name = file.name
        try:
            lines = _record_spans(file)
            self._locate(lines)
            if len(lines):
                [(_, text)] = self.lines(np.array([0]))
                self.first_line = text.removeprefix("\ufeff")
                first = next(csv.reader([self.first_line], delimiter=delimiter))
                self.columns = first if header else [str(i) for i in range(len(first))]
        except BaseException:
            self.files.close()
            raise
        if header:
            self._locate(lines[1:])

    def _locate(self, lines: npt.NDArray[np.int64]) -> None:
        self._numbers, starts, stops = lines.T
        self.located(np.column_stack([np.zeros_like(starts), starts, stops - starts]))

    def lines(self, records: npt.NDArray[np.int64]) -> list[tuple[int, str]]:
        """Returns the line number and the text of each record."""
        found = []
        numbers = self._numbers[records].tolist()
        for number, data in zip(numbers, self.read(records), strict=True):
            try:
                found.append((number, data.decode()))
            except UnicodeDecodeError:
                raise InvalidData(f"Csv: {self._name!r} line {number} is not UTF-8") from None
        return found


def _record_spans(file: DataFile) -> npt.NDArray[np.int64]:
    """Returns ``[records, 3]``, for every line that is not empty: its number from 1, the offset of
    its text, and the offset of its line break (``\\n`` or ``\\r\\n``)."""
    found, returns = [], []
    offset, last = 0, 0
    read = file.scan()
    while data := read(offset, _SCAN_NBYTES):
        here = np.frombuffer(data, np.uint8)
        before = np.concatenate([np.array([last], np.uint8), here[:-1]])
        at = np.flatnonzero(here == ord("\n"))
        found.append(at + offset)
        returns.append(before[at] == ord("\r"))
        offset += len(data)
        last = data[-1]
    breaks = np.concatenate([*found, np.empty(0, np.int64)])
    cut = np.concatenate([*returns, np.empty(0, bool)])
    starts = np.concatenate([[0], breaks + 1])
    # The text after the last line break is a line too, possibly empty.
    stops = np.concatenate([breaks - cut, [offset]])
    lines = np.flatnonzero(stops > starts)
    return np.column_stack([lines + 1, starts[lines], stops[lines]]).astype(np.int64)
