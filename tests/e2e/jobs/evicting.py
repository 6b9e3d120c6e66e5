"""Tables without room for all of their ids, and one that waits before it takes an id.

The gradients do not depend on the rows, so the records alone determine every update: the
gradient of an id is minus the sum of the worths of the records that name it, by ``BATCH``.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pserver import Embedding, Job
from tests.e2e.gated_arrays import GatedArrays

RECORDS, BATCH, THINGS = 320, 16, 400

TABLES: dict[str, dict[str, Any]] = {
    "aged": {"max_rows": 96, "evict": "age", "keep_evicted": True},
    "frequent": {"max_rows": 96, "evict": "frequency", "keep_evicted": True, "min_count": 2},
    "rare": {"min_count": 6},
}

rng = np.random.default_rng(5)
x = rng.zipf(1.2, size=(RECORDS, 3)) % THINGS
worth = rng.integers(1, 5, RECORDS).astype("float32")


def model() -> keras.Model:
    ids = keras.Input((3,), dtype="int64")
    rows = [Embedding(2, combiner="sum", name=name, **its)(ids) for name, its in TABLES.items()]
    return keras.Model(ids, keras.layers.Concatenate()(rows))


def loss(worth: Any, rows: Any) -> Any:
    return -tf.reduce_sum(worth[:, tf.newaxis] * rows) / BATCH


job = Job(
    model=model,
    loss=loss,
    optimizer=keras.optimizers.SGD(0.125, momentum=0.5),
    train=GatedArrays(x, worth),
    batch_size=BATCH,
    mode="sync",
    replicas=1,
    checkpoint_every=20,
    engine="numpy",
)
