"""MNIST with five hidden layers of 160 ELUs, momentum, and a learning rate that ends with the job.

coordinator up examples/mnist_dnn.py --shards 2 --workers 3 --set epochs=15

Asynchronous workers compute on parameters that others have changed meanwhile, which acts like
more momentum still: there, take ``--mode async --set optimizer.learning_rate=0.003``.
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
    hidden = [
        keras.layers.Dense(160, activation="elu", kernel_initializer="he_normal") for _ in range(5)
    ]
    return keras.Sequential(
        [keras.Input((784,)), *hidden, keras.layers.Dense(10, activation="softmax")]
    )


def build_optimizer(total_updates: int) -> keras.optimizers.Optimizer:
    rate = keras.optimizers.schedules.CosineDecay(0.01, decay_steps=total_updates)
    return keras.optimizers.SGD(learning_rate=rate, momentum=0.95)


job = Job(
    model=build_model,
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    optimizer=build_optimizer,
    train=Npz(MNIST, x="x_train", y="y_train", map=flatten),
    eval=Npz(MNIST, x="x_test", y="y_test", map=flatten),
    batch_size=50,
    epochs=4,
    mode="sync",
    replicas=3,
)
