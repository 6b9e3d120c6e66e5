"""Ratings of baskets of three things: ids of a growing table, and a dense layer on their rows.

The workers wait where a test wants to look at them, as those of ``gated.py`` do. Every random
number has a seed of its own, so ``tests.e2e.plain_table_loop`` builds the same network on a whole
table.
"""

import os

import keras
import numpy as np

from psrpc.batch import BatchId
from worker import Arrays, Embedding, Job
from worker.data import Batch

WIDTH, THINGS = 4, 300
INITIAL = 0.1
RATE, MOMENTUM = 0.05, 0.5

rng = np.random.default_rng(5)
names = rng.integers(-(2**63), 2**63 - 1, THINGS)
"""Ids of the things, all over int64."""

x = names[rng.zipf(1.3, size=(1230, 3)) % THINGS]
worth = rng.normal(size=THINGS).astype("float32")
y = worth[np.searchsorted(np.sort(names), x)].sum(1, keepdims=True)

GATE = os.environ.get("GATE")
EPOCH = int(os.environ.get("GATE_EPOCH", "0"))


class Gated(Arrays):
    def read(self, seed: int, batch: BatchId) -> Batch:
        if GATE and batch.epoch >= EPOCH:
            # A FIFO opens for reading once somebody has it open for writing.
            os.close(os.open(GATE, os.O_RDONLY))
        return super().read(seed, batch)


def network(rows: keras.layers.Layer) -> keras.Model:
    ids = keras.Input((3,), dtype="int64")
    flat = keras.layers.Flatten()(rows(ids))
    start = keras.initializers.GlorotUniform(seed=3)
    return keras.Model(ids, keras.layers.Dense(1, kernel_initializer=start, name="out")(flat))


def model() -> keras.Model:
    return network(
        Embedding(WIDTH, initializer=keras.initializers.Constant(INITIAL), name="things")
    )


job = Job(
    model=model,
    loss=keras.losses.MeanSquaredError(),
    optimizer=keras.optimizers.SGD(RATE, momentum=MOMENTUM),
    train=Gated(x, y),
    eval=Arrays(x[:500], y[:500]),
    batch_size=20,
    epochs=3,
    replicas=3,
    engine="numpy",
    intra_op_threads=1,
)
