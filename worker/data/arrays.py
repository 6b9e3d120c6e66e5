"""Data that fits in memory: arrays, and the NumPy files that hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from psrpc.core.text import counted
from worker.data.files import existing_file, hash_files, local_copy
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
        """Returns the name, for messages, of the record at a position of an epoch."""
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


class Npz:
    """Arrays of an ``.npz`` file, read into memory on first use.

    Args:
        path: the file. ``Path(__file__).parent / "data.npz"`` lies beside the job file; other
            relative paths are relative to the working directory. A URL such as
            ``s3://bucket/data.npz`` is first copied to a temporary file, see docs/urls.md.
        x: the key of the inputs, or a dict ``{name of the input: key}``. Two keys ``(values,
            row_splits)`` in place of one make a :class:`worker.data.ragged.Ragged`.
        y: the key of the labels.
        sample_weight: the key of the weights, optional.
        map: as for :class:`Arrays`.
        records: ``(start, stop)`` uses only these records of the file, counted from 0 and without
            ``stop`` itself, such as ``(0, 100)`` for the first hundred. None uses all.

    Raises:
        InvalidJob: ``records`` is no such pair; on first use: no such file or key, no ``.npz``
            file, or fewer records than ``stop``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        x: Key | Mapping[str, Key] = "x",
        y: str = "y",
        sample_weight: str | None = None,
        map: Map | None = None,
        records: tuple[int, int] | None = None,
    ) -> None:
        if records is not None:
            check_records(records)
        self._path = path
        self._keys = (x, y, sample_weight)
        self._map = map
        self._records = records
        self._lock = Lock()
        self._opened: Arrays | None = None

    @property
    def num_records(self) -> int:
        return self._arrays().num_records

    def read(self, seed: int, batch: BatchId) -> Batch:
        return self._arrays().read(seed, batch)

    def read_range(self, start: int, stop: int) -> Batch:
        return self._arrays().read_range(start, stop)

    def record_name(self, seed: int, epoch: int, position: int) -> str:
        """Returns the name, for messages, of the record at a position of an epoch."""
        return self._arrays().record_name(seed, epoch, position)

    def fingerprint(self) -> str:
        path = existing_file("Npz", self._path)
        return hash_files([path], self._keys, self._records)

    def close(self) -> None:
        with self._lock:
            self._opened = None

    def _arrays(self) -> Arrays:
        with self._lock:
            if self._opened is None:
                with local_copy(existing_file("Npz", self._path)) as path:
                    self._opened = self._load(path)
            return self._opened

    def _load(self, path: Path) -> Arrays:
        name = str(self._path)
        x, y, weight = self._keys
        try:
            # No pickles: a data file must not be able to run code. open() here, because numpy
            # leaves a damaged file open; not np.load, which takes unknown formats for pickles.
            with path.open("rb") as opened, NpzFile(opened, allow_pickle=False) as file:
                inputs = (
                    {name: self._column(file, key) for name, key in x.items()}
                    if isinstance(x, Mapping)
                    else self._column(file, x)
                )
                labels = self._column(file, y)
                weights = None if weight is None else self._column(file, weight)
        except BadZipFile as error:
            raise InvalidData(
                f"Npz: {name!r} is no .npz file, or a damaged one ({error}); expected what "
                "numpy.savez writes"
            ) from error
        except (OSError, ValueError, EOFError, AttributeError, TypeError) as error:
            # NumPy's advice is to allow pickles.
            objects = "allow_pickle" in str(error)
            why = "it has an array of Python objects; save numbers or strings" if objects else error
            raise InvalidData(f"Npz: {name!r} cannot be read as .npz: {why}") from error
        return Arrays(inputs, labels, weights, map=self._map)

    def _column(self, file: Any, key: Key) -> Array | Ragged:
        for one in key if isinstance(key, tuple) else (key,):
            if one not in file.files:
                raise InvalidData(
                    f"Npz: {str(self._path)!r} has no array {one!r}; it has {', '.join(file.files)}"
                )
        array = Ragged(*(file[one] for one in key)) if isinstance(key, tuple) else file[key]
        if self._records is not None:
            start, stop = self._records
            if stop > len(array):
                raise InvalidData(
                    f"Npz: records is {self._records}, and array {key!r} of {str(self._path)!r} "
                    f"has {counted(len(array), 'record')}; expected a stop of at most {len(array)}"
                )
            array = take(array, np.arange(start, stop))  # a copy, which frees the rest
        return array
