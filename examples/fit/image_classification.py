"""Handwritten digits, told apart by a small convolutional network.

python examples/fit/image_classification.py [--cluster]
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
    x, y = data["x_train"][:6000, ..., np.newaxis], data["y_train"][:6000]
    x_test, y_test = data["x_test"][:2000, ..., np.newaxis], data["y_test"][:2000]

layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(16, 3, strides=2, activation="relu"),
        layers.Conv2D(32, 3, strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dropout(0.3),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = model.fit(x, y, batch_size=64, epochs=3, validation_data=(x_test, y_test), verbose=2)

print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
