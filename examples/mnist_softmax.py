"""MNIST with softmax regression: one layer, plain SGD.

coordinator up examples/mnist_softmax.py --shards 2 --workers 3 --mode sync
"""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

from pserver import Batch, Job, Npz

MNIST = Path(__file__).parent / "data" / "mnist.npz"


def flatten(x: np.ndarray, y: np.ndarray) -> Batch:
    """``[n, 28, 28]`` bytes to ``[n, 784]`` floats between 0 and 1."""
    return x.reshape(len(x), 784).astype(np.float32) / np.float32(255), y


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(10, activation="softmax", kernel_initializer="zeros"),
        ]
    )


job = Job(
    model=build_model,
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    optimizer=keras.optimizers.SGD(learning_rate=0.01),
    train=Npz(MNIST, x="x_train", y="y_train", map=flatten),
    eval=Npz(MNIST, x="x_test", y="y_test", map=flatten),
    batch_size=100,
    epochs=50,
    mode="async",
    replicas=3,  # for --mode sync
)
