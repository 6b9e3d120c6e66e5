"""Validates a model in the process that called ``fit``."""

from __future__ import annotations

from typing import Any

import keras

from worker.data.source import DataSource, arrays_of


class Validation:
    """The validation data of a ``fit``, for states of the model that no worker evaluates: those
    within an epoch, and those that a hook for validation makes, as ``SwapEMAWeights`` does."""

    def __init__(self, model: keras.Model, source: DataSource, batch_size: int) -> None:
        """``source`` has records as workers read them; ``batch_size`` as in ``evaluate``."""
        self._model = model
        self._source = source
        self._batch_size = batch_size

    @property
    def steps(self) -> int:
        """The number of batches."""
        return -(-self._source.num_records // self._batch_size)

    def evaluate(self) -> dict[str, float]:
        """Returns loss and metrics of the model as it is, as ``keras.Model.evaluate``."""
        self._model.reset_metrics()
        results: dict[str, float] = {}
        for start in range(0, self._source.num_records, self._batch_size):
            stop = min(start + self._batch_size, self._source.num_records)
            x, y, *weights = self._source.read_range(start, stop)
            labels: Any = y if any(True for _ in arrays_of(y)) else None
            results = self._model.test_on_batch(x, labels, *weights, return_dict=True)
        return results
