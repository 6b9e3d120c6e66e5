"""Columns of Arrow tables as arrays: of Parquet files, and of data frames that a model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidData
from worker.data.ragged import Ragged
from worker.data.source import Array

Columns: TypeAlias = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""One column, a list of columns that become one array, or a dict of these by input."""

_VECTOR = {"type", "size", "indices", "values"}
"""The fields of Spark's vectors, as Parquet files have them."""


@dataclass(frozen=True)
class ColumnReader:
    """Turns columns of tables into arrays.

    A column of numbers or text becomes ``[n]``. A column of lists becomes ``[n, k]``, or a
    :class:`Ragged` if ``ragged`` names it. A list of columns is joined to ``[n, columns]``, where a
    column of lists takes ``k`` places.

    Attributes:
        name: the source, for messages.
        file: names the tables in messages.
        ragged: columns whose lists have different lengths.
        lengths: the length ``k`` of the lists of each other column; the first list read sets it.
        row_name: returns the name of a row in messages, from its number in the table.
    """

    name: str
    file: str
    ragged: frozenset[str] = frozenset()
    lengths: dict[str, int] = field(default_factory=dict)
    row_name: Callable[[int], str] = "row {}".format

    def check(self, schema: Any, columns: Sequence[str]) -> None:
        """Checks that a schema of Arrow has ``columns``, of types that become arrays.

        Raises:
            InvalidData: it lacks a column (the message suggests the nearest one), or a column has
                another type.
        """
        self.check_names(schema.names, columns)
        for column in columns:
            self._check_type(column, schema.field(column).type)

    def check_names(self, names: Sequence[str], columns: Sequence[str]) -> None:
        """Checks that ``columns`` are among ``names``; raises InvalidData with the nearest one."""
        for column in columns:
            if column not in names:
                near = get_close_matches(column, names, 1)
                raise InvalidData(
                    f"{self.name}: {self.file} has no column {column!r}; "
                    + (f"did you mean {near[0]!r}? " if near else "")
                    + f"it has {', '.join(names)}"
                )

    def _check_type(self, column: str, found: Any) -> None:
        from pyarrow import types

        inner = found.value_type if is_list(found) or types.is_dictionary(found) else found
        known = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, _is_text)
        if any(test(inner) for test in known):
            if column in self.ragged and not is_list(found):
                raise InvalidData(f"{self.name}: ragged has {column!r}, which holds no lists")
            return
        fields = {inner.field(i).name for i in range(inner.num_fields)}
        if types.is_struct(inner) and fields == _VECTOR:
            advice = "in Spark pyspark.ml.functions.vector_to_array makes a list of a vector"
        elif types.is_nested(inner):
            advice = "make columns of its parts"
        else:
            advice = "convert it where it is written, as dates to the seconds since 1970"
        raise InvalidData(
            f"{self.name}: column {column!r} of {self.file} is {_show(found)}; expected numbers, "
            f"text, or lists of them: {advice}"
        )

    def read(self, table: Any, columns: Columns, dtype: npt.DTypeLike | None = None) -> Any:
        """Returns the arrays of ``columns``, C-contiguous; for a dict, a dict of arrays.

        Without ``dtype``, joined columns and columns of fractions become float32, and other columns
        keep their type.

        Raises:
            InvalidData: a value is missing or does not fit ``dtype``, or lists of a column have
                different lengths; names the row.
        """
        if isinstance(columns, Mapping):
            return {key: self.read(table, each, dtype) for key, each in columns.items()}
        if isinstance(columns, str):
            return self._column(table, columns, None if dtype is None else np.dtype(dtype))
        found = []
        for column in columns:
            array = self._column(table, column, np.dtype(dtype or "float32"))
            if isinstance(array, Ragged):
                raise InvalidData(
                    f"{self.name}: ragged has {column!r}, which cannot be joined with other "
                    "columns; name it alone, as in x={'ids': 'ids'}"
                )
            found.append(array if array.ndim == 2 else array[:, np.newaxis])
        return np.concatenate(found, axis=1)

    def _column(self, table: Any, column: str, dtype: np.dtype[Any] | None) -> Array | Ragged:
        """Returns ``[n]``, ``[n, k]`` or a Ragged of ``n`` rows."""
        import pyarrow as pa

        chunks = table.column(column).chunks
        values = pa.concat_arrays(chunks) if chunks else pa.array([], table.field(column).type)
        each = np.arange(len(values) + 1)
        self._check_nulls(column, values, each)
        if not is_list(values.type):
            return self._array(column, values, dtype, each)
        if pa.types.is_fixed_size_list(values.type):
            splits = each * values.type.list_size
        else:
            splits = values.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
            splits -= splits[0]
        inner = values.flatten()
        self._check_nulls(column, inner, splits)
        flat = self._array(column, inner, dtype, splits)
        if column in self.ragged:
            return Ragged(flat, splits)
        lengths = np.diff(splits)
        expected = self.lengths.setdefault(column, int(lengths[0])) if len(lengths) else 0
        other = np.flatnonzero(lengths != expected)
        if len(other):
            raise InvalidData(
                f"{self.name}: {self.row_name(int(other[0]))} has {lengths[other[0]]} values in "
                f"column {column!r}; expected {expected}, as in the first one; for lists of "
                f"different lengths say ragged=[{column!r}]"
            )
        return flat.reshape(len(values), expected)

    def _check_nulls(self, column: str, values: Any, splits: npt.NDArray[np.int64]) -> None:
        if values.null_count:
            at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise InvalidData(
                f"{self.name}: {self._row(at, splits)} has no value in column {column!r}: "
                "fill it or leave the row out where the data is written"
            )

    def _array(
        self, column: str, values: Any, dtype: np.dtype[Any] | None, splits: npt.NDArray[np.int64]
    ) -> Array:
        """Returns ``[values]``; row i has those from ``splits[i]`` to ``splits[i + 1]``."""
        import pyarrow as pa

        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_decimal(values.type):
            values = values.cast(pa.float64())
        found: Array = values.to_numpy(zero_copy_only=False)
        if _is_text(values.type):
            found = found.astype(np.str_)
        if dtype is None:
            return found.astype(np.float32, copy=False) if found.dtype.kind == "f" else found
        if dtype.kind == "U":
            return found.astype(np.str_)
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                cast = found.astype(dtype)
        except ValueError:
            raise InvalidData(
                f"{self.name}: column {column!r} of {self.file} is text; expected {dtype}: take "
                "it as an input of its own, or with dtype 'str', and make numbers of it in map="
            ) from None
        exact = dtype.kind in "iub"
        wrong = np.flatnonzero(cast != found) if exact else np.empty(0, np.int64)
        if len(wrong):
            at = int(wrong[0])
            raise InvalidData(
                f"{self.name}: {self._row(at, splits)} has {found[at]} in column {column!r}; "
                f"expected {dtype}: give a dtype that holds it, such as 'float32'"
            )
        return cast

    def _row(self, at: int, splits: npt.NDArray[np.int64]) -> str:
        """Returns the name in messages of the row that contains the value at index ``at``."""
        return self.row_name(int(np.searchsorted(splits, at, side="right")) - 1)


def column_names(columns: Columns) -> list[str]:
    """Returns the names of all columns, each once."""
    return list(dict.fromkeys(_names(columns)))


def _names(columns: Columns) -> Iterator[str]:
    if isinstance(columns, str):
        yield columns
    else:
        parts = columns.values() if isinstance(columns, Mapping) else columns
        for part in parts:
            yield from _names(part)


def is_list(found: Any) -> bool:
    """Whether a type of Arrow is that of lists."""
    from pyarrow import types

    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(found) for test in tests)


def _is_text(found: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(found) or types.is_large_string(found))


def _show(found: Any) -> str:
    """Returns the name of a type, in 60 characters at most."""
    text = str(found)
    return text if len(text) <= 60 else f"{text[:57]}..."
