"""Layers learnt from the digits 0 to 4, frozen, help to tell 5 to 9 apart from few pictures.

python examples/fit/transfer_learning.py [--cluster]
"""

import contextlib
import json
import sys
from pathlib import Path

import keras
import numpy as np

import pserver

MNIST = Path(__file__).parent.parent / "data" / "mnist.npz"

keras.utils.set_random_seed(1)
with np.load(MNIST, allow_pickle=False) as data:
    x, y = data["x_train"][:8000, ..., np.newaxis], data["y_train"][:8000]
small, large = y < 5, y >= 5

layers = keras.layers
base = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(16, 3, strides=2, activation="relu"),
        layers.BatchNormalization(momentum=0.9),
        layers.Conv2D(32, 3, strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
    ],
    name="base",
)
first = keras.Sequential([base, layers.Dense(5, activation="softmax")])
first.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
first.fit(x[small], y[small], batch_size=64, epochs=2, verbose=2)

base.trainable = False
frozen = base.get_weights()
inputs = keras.Input((28, 28, 1))
hidden = layers.Dropout(0.2)(base(inputs, training=False))
model = keras.Model(inputs, layers.Dense(5, activation="softmax")(hidden))
model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])

with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = model.fit(x[large], y[large] - 5, epochs=4, validation_split=0.25, verbose=2)

assert all(map(np.array_equal, frozen, base.get_weights()))
print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
