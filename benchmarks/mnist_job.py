"""Jobs of the MNIST workloads."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

from benchmarks.workloads import Mnist
from pserver import Batch, Job, Npz

DATA = Path(__file__).resolve().parent.parent / "examples" / "data" / "mnist.npz"


def flatten(x: np.ndarray, y: np.ndarray) -> Batch:
    """``[n, 28, 28]`` bytes to ``[n, 784]`` floats between 0 and 1."""
    return x.reshape(len(x), 784).astype(np.float32) / np.float32(255), y


def mnist_job(mnist: Mnist) -> Job:
    """Trains alone: no evaluation, no checkpoint but the first and the last."""

    def model() -> keras.Model:
        inputs, *hidden, classes = mnist.layers
        return keras.Sequential(
            [
                keras.Input((inputs,)),
                *(keras.layers.Dense(units, mnist.activation) for units in hidden),
                keras.layers.Dense(classes),
            ]
        )

    return Job(
        model=model,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(mnist.learning_rate, momentum=mnist.momentum),
        train=Npz(DATA, x="x_train", y="y_train", map=flatten),
        batch_size=mnist.batch_size,
        epochs=mnist.epochs,
        checkpoint_every=10**9,
        mode="async",
    )
