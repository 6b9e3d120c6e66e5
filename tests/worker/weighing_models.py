"""Models that weigh the rows of one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.worker.flat_jobs import RECORDS
from worker import Embedding

V, W = 7, 4
WEIGHTS = np.linspace(-1, 1, W).astype(np.float32)


def some_ids(*shape: int, low: int = 0, high: int = V) -> Any:
    return np.random.default_rng(0).integers(low, high, (RECORDS, *shape))


class Weighed(keras.Model):  # type: ignore[misc]
    """Weighs the rows that ``look_up`` finds; with ``None`` the layer gets the batch as it is."""

    def __init__(self, prepare: Callable[[Any], Any] | None = None, **arguments: Any) -> None:
        super().__init__()
        self.rows = Embedding(W, arguments.pop("vocabulary", V), name="rows", **arguments)
        self.prepare = prepare

    def call(self, x: Any) -> Any:
        return tf.reduce_sum(self.rows(self.prepare(x) if self.prepare else x) * WEIGHTS, -1)
