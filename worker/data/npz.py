"""NumPy files as a data source."""

from __future__ import annotations

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
from worker.data.arrays import Arrays, Key, check_records
from worker.data.files import existing_file, hash_files, local_copy
from worker.data.ragged import Ragged, take
from worker.data.source import Array, Batch, Map


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
        """Returns how messages name the record at a position of an epoch."""
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
