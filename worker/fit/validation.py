"""Validates a model in the process that called ``fit``."""

from __future__ import annotations

import keras

from worker.data.source import DataSource
from worker.predict.shares import Share


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
        records = self._source.num_records
        data = Share(self._source, range(self.steps), self._batch_size, records)
        # This runs in this process, since a cluster that trains evaluates nothing else.
        results: dict[str, float] = self._model.evaluate(data, verbose=0, return_dict=True)
        return results
