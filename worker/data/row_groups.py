"""The row groups of Parquet files, as arrays."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np

from psrpc.core.errors import InvalidData
from worker.data.columns import ColumnReader, Columns, column_names, is_list
from worker.data.files import DataFile, DataFiles, Found, LocalFile, RecordIndex
from worker.data.permutation import GroupOrder
from worker.data.source import Batch


class RowGroups(RecordIndex):
    """The row groups of open files; keeps those that were used last in memory."""

    def __init__(self, found: Sequence[Found], mix: int, ragged: frozenset[str]) -> None:
        """Opens the files and reads their footers; call :meth:`use` next.

        Raises:
            InvalidData: a file is no Parquet file, or a damaged one.
        """
        super().__init__(found)
        from pyarrow.parquet import ParquetFile

        self._cached: OrderedDict[int, Batch] = OrderedDict()
        self._most = 2 * mix
        self._lock = Lock()
        self._ragged = ragged
        self._lengths: dict[str, int] = {}
        self._footers, self.schemas = [], []
        self._stamps = [_stamp(file) for file in self.files.files]
        try:
            for number, file in enumerate(self.files.files):
                with self._refusing(file), ParquetFile(_ReadableFile(self.files, number)) as opened:
                    self._footers.append(opened.metadata)
                    self.schemas.append(opened.schema_arrow)
        except BaseException:
            self.files.close()
            raise
        places = [
            (number, group, footer.row_group(group).num_rows)
            for number, footer in enumerate(self._footers)
            for group in range(footer.num_row_groups)
        ]
        self._places = [(number, group) for number, group, rows in places if rows]
        sizes = [rows for _, _, rows in places if rows]
        self.starts = np.cumsum([0, *sizes])
        self.num_records = int(self.starts[-1])
        self.order = GroupOrder(sizes, mix)

    def use(self, parts: Sequence[tuple[Columns, str | None]]) -> None:
        """Sets the columns of each part of a batch, with its dtype.

        Raises:
            InvalidData: a file lacks a column, or the column has another type than in the first
                file, or a type that is neither numbers, text nor lists of them.
        """
        self._parts = parts
        self._columns = column_names([name for each, _ in parts for name in column_names(each)])
        heads = dict(reversed([(number, at) for at, (number, _) in enumerate(self._places)]))
        self._heads = {number: int(self.starts[at]) for number, at in heads.items()}
        first = self.schemas[0]
        for file, schema in zip(self.files.files, self.schemas, strict=True):
            self._reader(file).check(schema, self._columns)
            for name in self._columns:
                here, there = schema.field(name).type, first.field(name).type
                if here != there:
                    raise InvalidData(
                        f"Parquet: column {name!r} of {file.name!r} is {here}, and of "
                        f"{self.files.files[0].name!r} {there}; write both alike"
                    )
        lists = [is_list(first.field(name).type) for name in self._columns]
        if any(lists) and self._places:
            # Reads the first group, because the lists of its first record set the lengths for all.
            self.group(0)

    def _reader(self, file: DataFile, first: int = 0) -> ColumnReader:
        """Returns the reader of a table that begins with record ``first`` of a file."""
        return ColumnReader(
            "Parquet",
            repr(file.name),
            self._ragged,
            self._lengths,
            lambda row: f"record {first + row} of {file.name!r}",
        )

    def record_name(self, record: int) -> str:
        """Returns the name of a record in messages: its number in its file."""
        group = int(np.searchsorted(self.starts, record, side="right")) - 1
        return self._reader_of(group).row_name(record - int(self.starts[group]))

    def _reader_of(self, group: int) -> ColumnReader:
        number, _ = self._places[group]
        return self._reader(self.files.files[number], int(self.starts[group]) - self._heads[number])

    def group(self, group: int) -> Batch:
        """Returns all records of a row group, from memory or its file."""
        with self._lock:
            if group not in self._cached:
                if len(self._cached) == self._most:
                    self._cached.popitem(last=False)
                self._cached[group] = self._load(group)
            self._cached.move_to_end(group)
            return self._cached[group]

    def _load(self, group: int) -> Batch:
        from pyarrow.parquet import ParquetFile

        number, inside = self._places[group]
        file = self.files.files[number]
        with self._refusing(file):
            if _stamp(file) != self._stamps[number]:
                raise InvalidData(
                    f"Parquet: {file.name!r} was changed since it was opened; start the job anew"
                )
            with ParquetFile(
                _ReadableFile(self.files, number), metadata=self._footers[number]
            ) as opened:
                # One thread: workers share the machine's cores.
                table = opened.read_row_group(inside, columns=self._columns, use_threads=False)
        reader = self._reader_of(group)
        return tuple(reader.read(table, columns, dtype) for columns, dtype in self._parts)

    @contextmanager
    def _refusing(self, file: DataFile) -> Iterator[None]:
        """Raises InvalidData that names the file in place of an error of pyarrow."""
        from pyarrow import ArrowException

        try:
            yield
        except (OSError, ArrowException) as error:
            raise InvalidData(
                f"Parquet: {file.name!r} cannot be read: {str(error).splitlines()[0]}"
            ) from error


def _stamp(file: DataFile) -> tuple[int, ...]:
    """Returns size and time of change of a local file, which reveal that it was written to. Empty
    for a URL: reading it reports a change."""
    if not isinstance(file, LocalFile):
        return ()
    found = os.fstat(file.descriptor)
    return found.st_size, found.st_mtime_ns


class _ReadableFile(io.RawIOBase):
    """A file in the form that pyarrow reads from."""

    def __init__(self, files: DataFiles, number: int) -> None:
        super().__init__()
        self._files, self._number, self._at = files, number, 0
        self._nbytes = files.files[number].nbytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = self._nbytes - self._at
        length = rest if size < 0 else min(size, rest)
        [data] = self._files.read(np.array([[self._number, self._at, length]]))
        self._at += length
        return data
