"""A small classifier with BatchNormalization, whose workers wait where a test wants to look at
them: before the first batch of an epoch, until the gate is opened (``tests.e2e.cluster.Gate``).
"""

import os

import keras
import numpy as np

from psrpc.batch import BatchId
from worker import Arrays, Job
from worker.data import Batch

rng = np.random.default_rng(7)
x = rng.normal(size=(1230, 12)).astype("float32")
y = (x @ rng.normal(size=(12, 4))).argmax(1).astype("int32")

GATE = os.environ.get("GATE")
EPOCH = int(os.environ.get("GATE_EPOCH", "0"))


class Gated(Arrays):
    def read(self, seed: int, batch: BatchId) -> Batch:
        if GATE and batch.epoch >= EPOCH:
            # A FIFO opens for reading once somebody has it open for writing.
            os.close(os.open(GATE, os.O_RDONLY))
        return super().read(seed, batch)


def model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(32, activation="tanh", name="hidden"),
            keras.layers.BatchNormalization(momentum=0.9, name="scale"),
            keras.layers.Dense(4, name="logits"),
        ]
    )


job = Job(
    model=model,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.SGD(0.02, momentum=0.9),
    metrics=["accuracy"],
    train=Gated(x, y),
    eval=Arrays(x[:500], y[:500]),
    batch_size=20,
    epochs=3,
    replicas=3,
    engine="numpy",
    intra_op_threads=1,
)
