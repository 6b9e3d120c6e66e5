"""The batches of a part, as Keras reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from worker.data.ragged import as_tensor
from worker.data.source import DataSource, map_arrays


class Share(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """Consecutive batches of stored data, as Keras takes them.

    Args:
        source: the records.
        batches: numbers of the batches.
        batch_size: records of each, except for the last one of the data.
        records: records of all data.
    """

    def __init__(self, source: DataSource, batches: range, batch_size: int, records: int) -> None:
        super().__init__()
        self._source = source
        self._batches = batches
        self._batch_size = batch_size
        self._records = records

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Returns ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``: numbers in arrays, text and
        ragged rows as tensors."""
        start = self._batches[index] * self._batch_size
        stop = min(start + self._batch_size, self._records)
        # Leave arrays of numbers to Keras, which converts them faster: this saves a tenth of the
        # time of a batch.
        return as_keras(self._source.read_range(start, stop), _in_tensors)


def as_keras(batch: tuple[Any, ...], convert: Callable[[Any], Any] = as_tensor) -> tuple[Any, ...]:
    """Returns a batch as Keras gives it to a step, without labels that are missing."""
    x, y, *weights = keras.tree.lists_to_tuples(map_arrays(convert, batch))
    return (x,) if isinstance(y, tuple) and not y else (x, y, *weights)


def _in_tensors(array: Any) -> Any:
    return (
        array if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" else as_tensor(array)
    )
