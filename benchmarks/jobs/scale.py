"""For ``benchmarks.scale``: batches without end, and parameters for a hundred shards."""

from __future__ import annotations

import keras
import numpy as np

from pserver import Arrays, Job

BATCHES = 200_000
"""Of an epoch."""


def build_model() -> keras.Model:
    hidden = keras.layers.Dense(1024)
    return keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])


job = Job(
    model=build_model,
    loss="mse",
    optimizer=keras.optimizers.SGD(0.01),
    train=Arrays(np.zeros((BATCHES, 4), np.float32), np.zeros((BATCHES, 1), np.float32)),
    batch_size=1,
    epochs=1_000,
    engine="numpy",
    checkpoint_every=10**9,
)
