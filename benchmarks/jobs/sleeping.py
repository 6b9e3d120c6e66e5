"""For ``benchmarks.sleeping_worker``: work that takes time and no processor."""

from __future__ import annotations

import keras
import numpy as np

from pserver import Arrays, Job

BATCHES = 2880
"""Of an epoch; divisible by the micro-batches of every round that is measured."""

BATCH_SIZE = 10


def build_model() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])


records = np.zeros((BATCHES * BATCH_SIZE, 4), np.float32)

job = Job(
    model=build_model,
    loss="mse",
    optimizer=keras.optimizers.SGD(0.01),
    train=Arrays(records, records),
    batch_size=BATCH_SIZE,
    epochs=1_000_000,
    engine="numpy",
    checkpoint_every=10**9,
)
