"""Regression by one layer, with a search of its learning rate: too high a rate diverges."""

import keras
import numpy as np

from pserver import Arrays, Job, space

rng = np.random.default_rng(3)
x = rng.normal(size=(400, 3)).astype("float32")
y = (x @ np.array([1.0, -2.0, 0.5], "float32"))[:, None]

job = Job(
    model=lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="linear")]),
    loss="mse",
    optimizer=keras.optimizers.SGD(0.02),
    train=Arrays(x, y),
    eval=Arrays(x[:100], y[:100]),
    batch_size=10,
    epochs=9,
    engine="numpy",
    mode="async",
    keep_best="min:loss",
)

search = {"optimizer.learning_rate": space.choice(0.1, 1e-4, 1e6)}
