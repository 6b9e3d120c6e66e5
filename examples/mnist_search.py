"""MNIST with dropout, and the search of its learning rate and rate of dropout as a grid.

coordinator tune examples/mnist_search.py --sampler grid --metric max:accuracy --parallel 2

The same four values as paired lists, two trials:

coordinator tune examples/mnist_search.py --sampler zip --metric max:accuracy
"""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

from pserver import Batch, Job, Npz, setting, space

MNIST = Path(__file__).parent / "data" / "mnist.npz"

dropout = setting("dropout", 0.45)


def flatten(x: np.ndarray, y: np.ndarray) -> Batch:
    """``[n, 28, 28]`` bytes to ``[n, 784]`` floats between 0 and 1."""
    return x.reshape(len(x), 784).astype(np.float32) / np.float32(255), y


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


job = Job(
    model=build_model,
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    optimizer=keras.optimizers.Adam(0.001),
    train=Npz(MNIST, x="x_train", y="y_train", map=flatten),
    eval=Npz(MNIST, x="x_test", y="y_test", map=flatten),
    batch_size=100,
    epochs=4,
    mode="sync",
    replicas=1,
)

search = {
    "optimizer.learning_rate": space.choice(0.001, 0.0001),
    "dropout": space.choice(0.45, 0.7),
}
