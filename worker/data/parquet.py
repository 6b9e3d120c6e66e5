"""Records of Parquet files, read by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidData
from psrpc.files.remote import find_in
from psrpc.files.urls import location
from psrpc.ops.extras import missing
from worker.data.columns import Columns, column_names
from worker.data.files import Found, IndexedSource, existing_files, hash_files
from worker.data.ragged import take
from worker.data.row_groups import RowGroups
from worker.data.source import Batch, Map, check_count, join_batches, map_arrays


class Parquet(IndexedSource[RowGroups]):
    """Records of Parquet files, one per row; needs pyarrow (extra ``parquet``).

    Each epoch takes the row groups of all files in a seeded order, ``mix`` at a time, and shuffles
    the records of these. Memory holds the columns of up to ``2 * mix`` row groups, and 8 bytes per
    record.

    Args:
        files: a path, a directory, a pattern such as ``data/part-*.parquet``, or a list of them. A
            directory stands for all its ``*.parquet``. The files of a directory or a pattern are
            sorted by name. URLs such as ``s3://bucket/data/`` are read in place (docs/urls.md); the
            URL of a directory ends with a slash.
        y: the labels: a column, or a list or dict of columns as for ``x``.
        x: the inputs: a column is ``[n]``, or ``[n, k]`` if it holds lists; a list of columns is
            joined to one array ``[n, columns]``; a dict has an array for each input. None means
            the list of all but ``y`` and ``sample_weight``.
        sample_weight: the column of the weights, optional.
        ragged: columns whose lists have different lengths; each becomes a ``Ragged``.
        x_dtype, y_dtype: numpy dtypes. By default, joined columns and columns of fractions become
            float32, and other columns keep their type.
        map: converts each batch ``x``, ``y`` (and ``sample_weight``) for the model.
        mix: row groups whose records are shuffled together.

    Raises:
        InvalidJob: pyarrow is missing; on first use: no such file or column, a type that is no
            number, text or list of them, or files with different columns; on reading: a missing
            value, or one that does not fit its dtype; names file, record and column.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        *,
        y: Columns,
        x: Columns | None = None,
        sample_weight: str | None = None,
        ragged: Sequence[str] = (),
        x_dtype: str | None = None,
        y_dtype: str | None = None,
        map: Map | None = None,
        mix: int = 4,
    ) -> None:
        super().__init__()
        if isinstance(mix, bool) or not isinstance(mix, int) or mix < 1:
            raise InvalidData(f"Parquet: mix is {mix!r}; expected a number of row groups")
        if isinstance(ragged, str):
            raise InvalidData(f"Parquet: ragged is {ragged!r}; expected a list of columns")
        self._files = [files] if isinstance(files, str | Path) else list(files)
        self._columns = (x, y, sample_weight)
        self._ragged = tuple(ragged)
        self._dtypes = tuple(each and np.dtype(each).str for each in (x_dtype, y_dtype))
        self._map = map
        self._mix = mix

    def record_name(self, seed: int, epoch: int, position: int) -> str:
        """Returns the name in messages of the record at a position of an epoch."""
        index = self._opened()
        [record] = index.order.records_at(seed, epoch, position, position + 1)
        return index.record_name(int(record))

    def fingerprint(self) -> str:
        return hash_files(self._found(), self._columns, self._ragged, self._dtypes, self._mix)

    def _found(self) -> list[Found]:
        return existing_files("Parquet", list(_listed(self._files)))

    def _open(self) -> RowGroups:
        try:
            import pyarrow.parquet  # noqa: F401
        except ModuleNotFoundError:
            raise missing("Parquet", "pyarrow", "parquet") from None
        index = RowGroups(self._found(), self._mix, frozenset(self._ragged))
        try:
            index.use(self._parts(index))
        except BaseException:
            index.files.close()
            raise
        return index

    def _parts(self, index: RowGroups) -> list[tuple[Columns, str | None]]:
        """Returns the columns of each part of a batch, with its dtype."""
        x, y, weight = self._columns
        if x is None:
            aside = {*column_names(y), weight}
            x = [name for name in index.schemas[0].names if name not in aside]
        parts: list[tuple[Columns, str | None]] = [(x, self._dtypes[0]), (y, self._dtypes[1])]
        if weight is not None:
            parts.append((weight, None))
        used = {name for each, _ in parts for name in column_names(each)}
        for name in self._ragged:
            if name not in used:
                raise InvalidData(
                    f"Parquet: ragged has {name!r}, which is no column that is read; "
                    f"expected some of {', '.join(sorted(used))}"
                )
        return parts

    def _batch(self, index: RowGroups, records: npt.NDArray[np.int64]) -> Batch:
        groups = np.searchsorted(index.starts, records, side="right") - 1
        parts, places = [], []
        for group in np.unique(groups):
            at = np.flatnonzero(groups == group)
            rows = records[at] - index.starts[group]
            parts.append(map_arrays(partial(take, rows=rows), index.group(int(group))))
            places.append(at)
        batch = join_batches(parts)
        if len(parts) > 1:
            order = np.argsort(np.concatenate(places))
            batch = map_arrays(partial(take, rows=order), batch)
        return batch if self._map is None else check_count("map", self._map(*batch), len(records))


def _listed(files: Sequence[str | Path]) -> Iterator[str | Path]:
    """Yields the paths, each directory replaced by its Parquet files."""
    for each in files:
        place = location(each)
        if isinstance(place, str) and place.endswith("/"):
            inside: list[str | Path] = [f"{place}{name}" for name in sorted(find_in(place))]
        elif isinstance(place, Path) and place.is_dir():
            inside = [*sorted(place.iterdir())]
        else:
            yield each
            continue
        found = [path for path in inside if str(path).endswith(".parquet")]
        if not found:
            raise InvalidData(
                f"Parquet: there is no *.parquet in {str(place)!r}; name the files by a pattern"
            )
        yield from found
