"""Data that fits in memory, as arrays."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from psrpc.core.text import counted
from worker.data.permutation import RecordOrder
from worker.data.ragged import Ragged, in_numpy, part, take
from worker.data.source import (
    Array,
    Batch,
    Map,
    arrays_of,
    check_count,
    check_range,
    map_arrays,
    named_arrays,
)

_HASHED_WHOLE = 64 << 20
Key = str | tuple[str, str]


class Arrays:
    """Records held in arrays.

    Args:
        x: an array, a :class:`worker.data.ragged.Ragged` or a ``tf.RaggedTensor``, or a dict, list
            or tuple of them, with one row per record.
        y: the labels, in the same forms.
        sample_weight: optional factor of each record's loss, ``[num_records]``. For several
            outputs: one array for all, a dict by output name, or a list in output order, as
            ``keras.Model.fit`` takes it.
        map: converts each batch ``(x, y)`` for the model, say bytes to scaled floats. It gets one
            batch at a time, so the arrays can stay small in memory.

    Raises:
        InvalidJob: row counts differ, or an array holds neither numbers nor strings.
    """

    def __init__(
        self, x: Any, y: Any, sample_weight: Any = None, *, map: Map | None = None
    ) -> None:
        self._map = map
        parts = (x, y) if sample_weight is None else (x, y, sample_weight)
        self._parts: Batch = map_arrays(_as_array, parts)
        named = [
            pair
            for name, nest in zip(("x", "y", "sample_weight"), self._parts, strict=False)
            for pair in named_arrays(name, nest)
        ]
        for name, array in named:
            if not array.ndim:
                raise InvalidData(
                    f"Arrays: {name} is {_shown(array.item())}; expected an array with one "
                    "row per record (np.array makes one of a list)"
                )
            if array.dtype.hasobject:
                raise InvalidData(
                    f"Arrays: {name} has dtype object and shape {array.shape}, with "
                    f"{_objects(array)}; expected rows of equal shape, of numbers or of strings, "
                    "or lists alone"
                )
        counts = {len(array) for _, array in named}
        if len(counts) != 1:
            lengths = ", ".join(
                f"{name} has {counted(len(array), 'record')}" for name, array in named
            )
            raise InvalidData(
                f"Arrays of different lengths: {lengths}; expected one row per record"
            )
        (self._records,) = counts
        self._order = RecordOrder(self._records)

    @property
    def num_records(self) -> int:
        return self._records

    def read(self, seed: int, batch: BatchId) -> Batch:
        stop = batch.first + batch.count
        check_range("Arrays", batch.first, stop, self._records)
        rows = self._order.records_at(seed, batch.epoch, batch.first, stop)
        return self._mapped(map_arrays(lambda a: take(a, rows), self._parts), len(rows))

    def read_range(self, start: int, stop: int) -> Batch:
        check_range("Arrays", start, stop, self._records)
        return self._mapped(map_arrays(lambda a: part(a, start, stop), self._parts), stop - start)

    def _mapped(self, batch: Batch, count: int) -> Batch:
        return batch if self._map is None else check_count("map", self._map(*batch), count)

    def record_name(self, seed: int, epoch: int, position: int) -> str:
        """Returns how messages name the record at a position of an epoch."""
        return f"record {self._order.records_at(seed, epoch, position, position + 1)[0]}"

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for array in arrays_of(self._parts):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            pieces = [array.values, array.row_splits] if isinstance(array, Ragged) else [array]
            for piece in pieces:
                # Evenly spread rows of a large array are enough to distinguish datasets.
                step = max(1, piece.nbytes // _HASHED_WHOLE)
                digest.update(piece[::step].tobytes())
        return digest.hexdigest()[:32]

    def close(self) -> None:
        pass


def _objects(array: Array | Ragged) -> str:
    """Returns the first object of each type and its position."""
    shown: dict[type, str] = {}
    values = array.values if isinstance(array, Ragged) else array
    for place, one in zip(np.ndindex(values.shape), values.flat, strict=True):
        if type(one) not in shown:
            shown[type(one)] = f"{_shown(one)} at {_place(array, place)}"
    return ", ".join(shown.values())


def _place(array: Array | Ragged, index: tuple[int, ...]) -> str:
    """Names the element at an index of the array, or of the values of a Ragged."""
    if isinstance(array, Ragged):
        record = int(np.searchsorted(array.row_splits, index[0], side="right")) - 1
        index = (record, index[0] - int(array.row_splits[record]), *index[1:])
    record, *inner = index
    within = {0: "", 1: f" column {inner[0]}" if inner else ""}.get(len(inner), f" at {inner}")
    return f"record {record}{within}"


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:60]


def check_records(records: object) -> None:
    """Refuses everything but a pair of integers with 0 <= start < stop."""
    pair = records if isinstance(records, tuple | list) and len(records) == 2 else ()
    whole = [int(one) for one in pair if _is_whole(one)]
    if len(whole) == 2 and 0 <= whole[0] < whole[1]:
        return
    first = ""
    if isinstance(records, int) and records > 0:
        first = f": records=(0, {records}) takes the first {records}"
    raise InvalidData(
        f"Npz: records is {_shown(records)}; expected a pair (start, stop) of whole numbers with "
        f"0 <= start < stop{first}"
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _as_array(values: Any) -> Array | Ragged:
    values = in_numpy(values)
    if isinstance(values, Ragged):
        return values
    array: Array = np.asarray(values)
    if not array.ndim or not array.dtype.hasobject:
        return array
    if all(isinstance(one, str | bytes) for one in array.flat):
        # pandas stores strings as objects.
        return array.astype(bytes if any(isinstance(one, bytes) for one in array.flat) else str)
    if array.ndim == 1 and all(isinstance(one, list | tuple | np.ndarray) for one in array):
        return Ragged.from_rows(array)  # pandas stores lists as objects
    return array
