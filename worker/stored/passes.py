"""Epochs of a job as stretches of passes over data, in the order that ``fit`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Lock
from typing import Literal

import numpy as np

from psrpc.core.batch import BatchId
from worker.data.permutation import RecordOrder, permutation
from worker.data.ragged import take
from worker.data.source import Batch, DataSource, check_range, join_batches, map_arrays

Order = Literal["shuffled", "kept", "batches", "within_batches"]
"""The order of a pass. ``shuffled``: the source shuffles all records. ``kept``: nothing is
shuffled. ``batches``: the batches are shuffled, except a short last one, which stays last.
``within_batches``: the records of each batch are shuffled."""


class Passes:
    """A data source whose epoch is a part of a pass over another source, or a whole one.

    The epochs follow each other in the passes, as with Keras's ``steps_per_epoch``: with 10 records
    and 4 of them per epoch, the third epoch takes the last 2 records of the first pass and the
    first 2 of the second, which has an order of its own.

    Args:
        open_source: returns the other source; called on first use.
        pass_records: its number of records.
        records: the number of records of an epoch, at most ``pass_records``.
        batch_size: records of a batch, for ``batches`` and ``within_batches``.
        order: the order of the records in each pass.
        fingerprint: the fingerprint of the contents.
        quick: see :class:`worker.data.source.DataSource`.
    """

    def __init__(
        self,
        open_source: Callable[[], DataSource],
        *,
        pass_records: int,
        records: int,
        batch_size: int,
        order: Order,
        fingerprint: str,
        quick: bool = False,
    ) -> None:
        assert 0 < records <= pass_records
        self._open_source = open_source
        self._pass_records = pass_records
        self._records = records
        self._batch_size = batch_size
        self._order = order
        self._fingerprint = fingerprint
        self.quick = quick
        self._lock = Lock()
        self._opened: DataSource | None = None
        self._full_batches = pass_records // batch_size
        self._batch_order = RecordOrder(self._full_batches)

    @property
    def num_records(self) -> int:
        return self._records

    def read(self, seed: int, batch: BatchId) -> Batch:
        check_range("the data", batch.first, batch.first + batch.count, self._records)
        first = batch.epoch * self._records + batch.first
        return join_batches(list(self._pieces(seed, first, first + batch.count)))

    def read_range(self, start: int, stop: int) -> Batch:
        check_range("the data", start, stop, self._records)
        return self._source().read_range(start, stop)

    def record_name(self, seed: int, epoch: int, position: int) -> str:
        """Returns how messages name the record at a position of an epoch."""
        number, at = divmod(epoch * self._records + position, self._pass_records)
        if self._order == "shuffled":
            named = getattr(self._source(), "record_name", None)
            return f"record {at} of pass {number}" if named is None else named(seed, number, at)
        index, place = divmod(at, self._batch_size)
        if self._order == "within_batches":
            place = int(self._places(seed, number, index)[place])
        return f"record {self._batch_at(seed, number, index) * self._batch_size + place}"

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    def _source(self) -> DataSource:
        with self._lock:
            if self._opened is None:
                self._opened = self._open_source()
            return self._opened

    def _pieces(self, seed: int, first: int, stop: int) -> Iterator[Batch]:
        """Yields the records at positions ``[first, stop)``, counted over all passes."""
        source = self._source()
        # One batch at a time, unless the order has nothing to do with batches.
        longest = self._batch_size
        if self._order in ("shuffled", "kept"):
            longest = self._pass_records
        while first < stop:
            number, at = divmod(first, self._pass_records)
            index, low = divmod(at, longest)
            size = min(longest, self._pass_records - index * longest)
            high = min(low + stop - first, size)
            first += high - low
            if self._order == "shuffled":
                yield source.read(seed, BatchId(number, at, high - low))
            elif self._order == "within_batches":
                whole = source.read_range(index * longest, index * longest + size)
                places = self._places(seed, number, index)[low:high]
                taken: Batch = map_arrays(lambda array, rows=places: take(array, rows), whole)  # type: ignore[misc]
                yield taken
            else:
                start = self._batch_at(seed, number, index) * longest
                yield source.read_range(start + low, start + high)

    def _batch_at(self, seed: int, number: int, index: int) -> int:
        """Returns the batch at place ``index`` of a pass."""
        if self._order != "batches" or index >= self._full_batches:
            return index
        return int(self._batch_order.records_at(seed, number, index, index + 1)[0])

    def _places(
        self, seed: int, number: int, index: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Returns the order of the records within a batch."""
        size = min(self._batch_size, self._pass_records - index * self._batch_size)
        return permutation(size, seed, number, index)
