"""Records of different lengths: in NumPy for data sources, in TensorFlow for models."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidData

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Ragged:
    """An array whose rows have different lengths, say the ids of each record. The model gets it as
    a ``tf.RaggedTensor`` ``[rows, None, ...]``.

    Args:
        values: ``[n, ...]``, the values of all rows, row after row.
        row_splits: ``[rows + 1]``, integers that ascend from 0 to n: row i is
            ``values[row_splits[i]:row_splits[i + 1]]``.

    Raises:
        InvalidJob: ``row_splits`` do not ascend from 0 to n.
    """

    values: Array
    row_splits: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        values, splits = np.ascontiguousarray(self.values), np.asarray(self.row_splits)
        if splits.ndim != 1 or splits.dtype.kind not in "iu" or not splits.size:
            raise InvalidData(
                f"Ragged: row_splits are {splits.dtype} of shape {splits.shape}; expected integers "
                "[rows + 1]"
            )
        if splits[0] != 0 or splits[-1] != len(values) or (splits[1:] < splits[:-1]).any():
            raise InvalidData(
                f"Ragged: row_splits must ascend from 0 to {len(values)}, the number of values; "
                f"they are {splits[0]} to {splits[-1]}"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "row_splits", splits.astype(np.int64, copy=False))

    @classmethod
    def from_rows(cls, rows: Iterable[Any], dtype: npt.DTypeLike | None = None) -> Ragged:
        """Makes a ``Ragged`` from rows that are lists or arrays. Without ``dtype`` NumPy chooses
        the dtype; if all rows are empty it is int64."""
        arrays = [np.asarray(row, dtype) for row in rows]
        splits = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        # NumPy would make an empty list float.
        filled = [array for array in arrays if len(array)]
        return cls(np.concatenate(filled) if filled else np.empty(0, dtype or np.int64), splits)

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    def __getitem__(self, rows: slice) -> Ragged:
        """Returns the rows of a slice without a step; values are a view."""
        first, stop, step = rows.indices(len(self))
        assert step == 1
        splits = self.row_splits[first : max(first, stop) + 1]
        return Ragged(self.values[splits[0] : splits[-1]], splits - splits[0])

    @property
    def shape(self) -> tuple[int | None, ...]:
        """``(rows, None, ...)``."""
        return (len(self), None, *self.values.shape[1:])

    @property
    def ndim(self) -> int:
        """``values.ndim + 1``."""
        return self.values.ndim + 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ``values``."""
        return self.values.dtype

    def take(self, rows: npt.NDArray[np.int64]) -> Ragged:
        """Returns a copy of the rows with these numbers, in their order."""
        starts = self.row_splits[rows]
        lengths = self.row_splits[rows + 1] - starts
        splits = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(starts - splits[:-1], lengths) + np.arange(splits[-1])
        return Ragged(self.values[at], splits)


def take(array: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Returns a copy of the rows with these numbers, of an array or a :class:`Ragged`."""
    return array.take(rows) if isinstance(array, Ragged) else np.take(array, rows, axis=0)


def part(array: Any, low: int, high: int) -> Any:
    """Returns rows ``[low, high)`` of an array or a :class:`Ragged`, C-contiguous, as a view if
    possible."""
    rows = array[low:high]
    return rows if isinstance(rows, Ragged) else np.ascontiguousarray(rows)


def joined(arrays: Sequence[Any]) -> Any:
    """Joins arrays, or :class:`Ragged` only, end to end."""
    if not isinstance(arrays[0], Ragged):
        return np.concatenate(arrays)
    ends = np.cumsum([0, *(len(each.values) for each in arrays)])
    splits = [each.row_splits[1:] + end for each, end in zip(arrays, ends[:-1], strict=True)]
    return Ragged(np.concatenate([each.values for each in arrays]), np.concatenate([[0], *splits]))


def in_numpy(value: Any) -> Any:
    """Converts a tensor to an array, a ragged or sparse one to a :class:`Ragged`; keeps the rest.

    Sparse rows must be filled from their beginning, as ``tf.io.VarLenFeature`` gives them.

    Raises:
        InvalidJob: it has other dimensions than ``[rows, None, ...]``, or gaps.
    """
    if "tensorflow" not in sys.modules:
        return value  # it cannot be a tensor
    import tensorflow as tf

    if isinstance(value, tf.SparseTensor):
        if value.shape.rank != 2:
            raise InvalidData(
                f"a sparse tensor has shape {value.shape}; expected [records, None]: make it dense "
                "with tf.sparse.to_dense"
            )
        rows, columns = value.indices.numpy().T
        splits = np.searchsorted(rows, np.arange(int(value.dense_shape[0]) + 1))
        if not np.array_equal(columns, np.arange(len(rows)) - splits[rows]):
            raise InvalidData(
                "a sparse tensor has rows with gaps; where a value stands in its row would be "
                "lost: make it dense with tf.sparse.to_dense"
            )
        return Ragged(value.values.numpy(), splits)
    if isinstance(value, tf.RaggedTensor):
        if value.ragged_rank != 1:
            raise InvalidData(
                f"a ragged tensor has shape {value.shape}; expected one dimension that differs, "
                "the second"
            )
        return Ragged(value.values.numpy(), value.row_splits.numpy())
    return value.numpy() if isinstance(value, tf.Tensor) else value


def as_tensor(array: Any) -> Any:
    """Converts an array to a ``tf.Tensor``, and a :class:`Ragged`, a ragged or a sparse tensor to a
    ``tf.RaggedTensor``."""
    import tensorflow as tf

    if isinstance(array, tf.RaggedTensor | tf.SparseTensor):
        array = in_numpy(array)
    if not isinstance(array, Ragged):
        return tf.convert_to_tensor(array)
    # Ragged has checked the splits.
    return tf.RaggedTensor.from_row_splits(array.values, array.row_splits, validate=False)
