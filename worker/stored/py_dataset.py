"""Reads the batches of a ``keras.utils.PyDataset`` by index, and presents them as records."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import keras

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from psrpc.core.text import counted
from psrpc.ops.logs import get_logger
from worker.data.ragged import part
from worker.data.source import Batch, arrays_of, check_range, join_batches, map_arrays
from worker.stored.forms import as_batch

log = get_logger()


def read_item(dataset: Any, index: int) -> Batch:
    """Returns batch ``index`` of a PyDataset as ``(x, y)`` or ``(x, y, sample_weight)`` in arrays.

    Raises:
        InvalidData: it is no batch; names the dataset and the index.
    """
    return as_batch(f"{type(dataset).__name__}[{index}]", dataset[index])


def records_of(batch: Batch) -> int:
    """Returns the number of records of a batch."""
    return len(next(arrays_of(batch)))


def measured(name: str, dataset: Any) -> tuple[int, int]:
    """Returns the batch size and the number of records of the PyDataset that is argument ``name``.
    Makes its first and its last batch.

    Raises:
        InvalidData: it has no end, is empty, or its last batch is larger than the first.
    """
    kind = type(dataset).__name__
    try:
        batches = dataset.num_batches
    except NotImplementedError:
        batches = None
    if batches is None:
        raise InvalidData(
            f"{name} is the PyDataset {kind} without a number of batches; give it __len__: an "
            "epoch needs an end, and workers read any of its batches"
        )
    if batches < 1:
        raise InvalidData(f"{name} is the PyDataset {kind} of 0 batches; expected at least one")
    own = [
        hook
        for hook in ("on_epoch_begin", "on_epoch_end")
        if getattr(type(dataset), hook) is not getattr(keras.utils.PyDataset, hook)
    ]
    if own:
        log.warning(
            f"{' and '.join(own)} of {kind} {'is' if len(own) == 1 else 'are'} not called: workers "
            "read its batches at any time; with shuffle=True their order changes each epoch"
        )
    first = records_of(read_item(dataset, 0))
    last = first if batches == 1 else records_of(read_item(dataset, batches - 1))
    if last > first:
        raise InvalidData(
            f"{kind}[{batches - 1}] has {counted(last, 'record')}, and {kind}[0] has {first}; "
            "expected batches of one size, of which only the last may be smaller"
        )
    return first, (batches - 1) * first + last


class ItemRecords:
    """The records of a PyDataset in order: the batches 0, 1, 2 and so on, of equal size except the
    last. Keeps the batch that it has made last, since several reads may take parts of it.
    Thread-safe.

    Args:
        open_dataset: returns the PyDataset; called on first use.
        batch_size: records of each batch.
        records: their total number.
    """

    def __init__(self, open_dataset: Callable[[], Any], *, batch_size: int, records: int) -> None:
        self._open_dataset = open_dataset
        self._batch_size = batch_size
        self._records = records
        # Held during a read: a PyDataset need not be thread-safe.
        self._lock = Lock()
        self._dataset: Any = None
        self._last: tuple[int, Batch] | None = None

    @property
    def num_records(self) -> int:
        return self._records

    def read(self, seed: int, batch: BatchId) -> Batch:  # noqa: ARG002
        """Returns the records at the positions of ``batch`` in the order of the dataset."""
        return self.read_range(batch.first, batch.first + batch.count)

    def read_range(self, start: int, stop: int) -> Batch:
        check_range("the PyDataset", start, stop, self._records)
        pieces = []
        while start < stop:
            index, low = divmod(start, self._batch_size)
            high = min(low + stop - start, self._batch_size)
            item = self._item(index)
            pieces.append(item if high - low == records_of(item) else _rows(item, low, high))
            start += high - low
        return join_batches(pieces)

    def fingerprint(self) -> str:
        """Returns only the sizes: a PyDataset may make other records each time."""
        return f"{self._records}/{self._batch_size}"

    def close(self) -> None:
        with self._lock:
            self._dataset = self._last = None

    def _item(self, index: int) -> Batch:
        with self._lock:
            if self._last is None or self._last[0] != index:
                if self._dataset is None:
                    self._dataset = self._open_dataset()
                item = read_item(self._dataset, index)
                expected = min(self._batch_size, self._records - index * self._batch_size)
                if records_of(item) != expected:
                    raise InvalidData(
                        f"{type(self._dataset).__name__}[{index}] has "
                        f"{counted(records_of(item), 'record')}; expected {expected}: all batches "
                        "have the size of the first, and the last keeps the one that it had when "
                        "fit was called"
                    )
                self._last = index, item
            return self._last[1]


def _rows(batch: Batch, low: int, high: int) -> Batch:
    rows: Batch = map_arrays(lambda array: part(array, low, high), batch)
    return rows
