"""Jobs of the workloads with an embedding table: rows, and no mathematics to speak of."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from benchmarks.dense_job import output
from benchmarks.workloads import RowsDrawn
from pserver import Arrays, Batch, Embedding, Job


class Drawn(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A table. Its output is 0, with the gradient ``1e-3 * row + 1e-6`` for each row, as often as
    its id was drawn."""

    def __init__(self, drawn: RowsDrawn) -> None:
        super().__init__()
        self.table = Embedding(drawn.width, drawn.vocabulary, initializer="zeros", name="rows")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        """A scalar, of ids ``[1, n]``."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def zero(rows: tf.Tensor) -> Any:
            return tf.constant(0.0), lambda _upstream: 1e-3 * rows + 1e-6

        return zero(self.table(ids))


def draw(drawn: RowsDrawn, steps: npt.NDArray[np.int64], nothing: npt.NDArray[np.float32]) -> Batch:
    """Of steps ``[n, 1]`` their ids, int64 ``[n, count]``."""
    ids = []
    for step in steps[:, 0]:
        random = np.random.default_rng(step)
        if drawn.zipf:
            # Nearly Zipf's law: the logarithm of a rank is uniform.
            ranks = np.exp(random.random(drawn.count) * np.log(drawn.vocabulary + 1))
            ids.append(ranks.astype(np.int64) - 1)
        else:
            ids.append(random.integers(0, drawn.vocabulary, drawn.count))
    return np.stack(ids), nothing


def row_job(drawn: RowsDrawn) -> Job:
    """One epoch of ``drawn.steps`` batches that are drawn when they are read; no checkpoint."""
    steps = np.arange(drawn.steps)[:, np.newaxis]
    return Job(
        model=lambda: Drawn(drawn),
        loss=output,
        optimizer=keras.optimizers.SGD(1e-3),
        train=Arrays(steps, np.zeros(steps.shape, np.float32), map=partial(draw, drawn)),
        batch_size=1,
        checkpoint_every=10**9,
        mode="async",
    )
