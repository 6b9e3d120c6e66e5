"""Regression with some infinite records: `--set seed` does not matter, the count does."""

import os

import keras
import numpy as np

from pserver import Arrays, Job

rng = np.random.default_rng(3)
x = rng.normal(size=(400, 3)).astype("float32")
y = (x @ np.array([1.0, -2.0, 0.5], "float32"))[:, None]
x[: int(os.environ.get("POISONED", "1"))] = np.inf

job = Job(
    model=lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="linear")]),
    loss="mse",
    optimizer=keras.optimizers.SGD(0.02),
    train=Arrays(x, y),
    batch_size=10,
    epochs=1,
    engine="numpy",
    replicas=2,
)
