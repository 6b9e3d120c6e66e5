"""MNIST with convolutions, batch normalization and dropout, trained by Adam.

coordinator up examples/mnist_cnn.py --shards 2 --workers 2
"""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

from pserver import Batch, Job, Npz

MNIST = Path(__file__).parent / "data" / "mnist.npz"


def scale(x: np.ndarray, y: np.ndarray) -> Batch:
    """``[n, 28, 28]`` bytes to ``[n, 28, 28, 1]`` floats between 0 and 1."""
    return x[..., np.newaxis].astype(np.float32) / np.float32(255), y


def build_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(32, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )


job = Job(
    model=build_model,
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    optimizer=keras.optimizers.Adam(learning_rate=0.001),
    train=Npz(MNIST, x="x_train", y="y_train", map=scale),
    eval=Npz(MNIST, x="x_test", y="y_test", map=scale),
    batch_size=100,
    epochs=3,
    mode="sync",
    replicas=2,
)
