"""A model as a class, with a layer of its own that adds to the loss.

python examples/fit/subclassed_model.py [--cluster]
"""

import contextlib
import json
import sys
from typing import Any

import keras
import numpy as np

import pserver


class Sparse(keras.layers.Layer):
    """Dense units of which few are active at a time."""

    def __init__(self, units: int, rate: float = 1e-4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.rate = rate
        self.dense = keras.layers.Dense(units, activation="relu")

    def call(self, x: Any) -> Any:
        active = self.dense(x)
        self.add_loss(self.rate * keras.ops.mean(keras.ops.sum(active, axis=-1)))
        return active


class Regressor(keras.Model):
    """Blocks of sparse units, each of which sees the input as well."""

    def __init__(self, blocks: int, units: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.units = units
        self.parts = [Sparse(units) for _ in range(blocks)]
        self.dropout = keras.layers.Dropout(0.1)
        self.head = keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = x
        for part in self.parts:
            hidden = keras.ops.concatenate([part(hidden), x], axis=-1)
        return self.head(self.dropout(hidden, training=training))


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).uniform(-2, 2, size=(4000, 6)).astype("float32")
y = np.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] - np.abs(x[:, 3:4])

model = Regressor(blocks=2, units=64)
model.compile(keras.optimizers.Adam(0.005), "mse", metrics=["mae"])

with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = model.fit(x, y, epochs=10, validation_split=0.2, verbose=2)

print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
