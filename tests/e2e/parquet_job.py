"""A job whose table says how often each record of a Parquet file was counted."""

from __future__ import annotations


def counting_job(records: int, batch: int, epochs: int) -> str:
    """Returns the job file. Each record has two ids in ``things`` and adds its ``worth`` to their
    rows; the path of the data is the setting ``data``."""
    return f"""
import keras, tensorflow as tf
from pserver import Embedding, Job, Parquet, setting
def loss(worth, rows):
    # With this learning rate each record adds its worth to its rows, whose ids are in a list.
    return -tf.reduce_sum(worth[:, None] * rows) / {batch}
def model():
    x = keras.Input((2,), dtype="int64")
    table = Embedding(1, {2 * records}, initializer="zeros", name="things")
    return keras.Model(x, keras.layers.Flatten()(table(x)))
data = Parquet(setting("data", ""), y="worth", x="things")
job = Job(model=model, loss=loss, optimizer=keras.optimizers.SGD({batch}.0), engine="numpy",
          train=data, batch_size={batch}, epochs={epochs}, mode="async")
"""
