"""coordinator up benchmarks/jobs/rows_and_64MB.py, from the repository's root."""

from functools import partial

import keras
import numpy as np
import tensorflow as tf

from benchmarks.dense_job import Variables, output
from benchmarks.row_job import Drawn, draw
from benchmarks.workloads import DENSE, ROWS
from pserver import Arrays, Job


class RowsAndVariables(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A table and 64 MB of dense variables, with the gradients that each has in its own job."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Drawn(ROWS["emb_4096"])
        self.dense = Variables(DENSE["dense_1x64MB"])

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        """A scalar, of ids ``[1, n]``."""
        return self.rows(ids) + self.dense(ids)


_steps = np.arange(DENSE["dense_1x64MB"].steps)[:, np.newaxis]

job = Job(
    model=RowsAndVariables,
    loss=output,
    optimizer=keras.optimizers.SGD(1e-3),
    train=Arrays(_steps, np.zeros(_steps.shape, np.float32), map=partial(draw, ROWS["emb_4096"])),
    batch_size=1,
    checkpoint_every=10**9,
    mode="async",
)
