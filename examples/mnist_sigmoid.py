"""MNIST with one hidden layer of 100 sigmoids, plain SGD, as in a 2016 report on three machines.

coordinator up examples/mnist_sigmoid.py --shards 1 --workers 3 --set epochs=60
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


def dense(units: int, activation: str) -> keras.layers.Layer:
    # An initializer for each layer: one that is shared draws the same numbers twice.
    normal = keras.initializers.RandomNormal(stddev=1.0)
    return keras.layers.Dense(units, activation=activation, kernel_initializer=normal)


def build_model() -> keras.Model:
    return keras.Sequential([keras.Input((784,)), dense(100, "sigmoid"), dense(10, "softmax")])


job = Job(
    model=build_model,
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    optimizer=keras.optimizers.SGD(learning_rate=0.001),
    train=Npz(MNIST, x="x_train", y="y_train", map=flatten),
    eval=Npz(MNIST, x="x_test", y="y_test", map=flatten),
    batch_size=100,
    epochs=20,
    mode="async",
)
