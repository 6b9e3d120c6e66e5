"""The network of mnist_dnn.py on two devices of each worker.

coordinator up examples/mnist_devices.py --gpu 0,1                     # half of each layer's units
coordinator up examples/mnist_devices.py --gpu 0,1 --set cut=layers    # half of the layers
coordinator up examples/mnist_devices.py --devices cpu:2               # to try it without GPUs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

from pserver import Batch, Job, Npz, setting

MNIST = Path(__file__).parent / "data" / "mnist.npz"
CUTS: dict[str, Any] = {
    "columns": "columns",
    "layers": {"hidden_[45]": 1, "digits": 1},
    "none": None,
}

cut = setting("cut", "columns")


def flatten(x: np.ndarray, y: np.ndarray) -> Batch:
    """``[n, 28, 28]`` bytes to ``[n, 784]`` floats between 0 and 1."""
    return x.reshape(len(x), 784).astype(np.float32) / np.float32(255), y


def build_model() -> keras.Model:
    hidden = [
        keras.layers.Dense(
            160, activation="elu", kernel_initializer="he_normal", name=f"hidden_{number}"
        )
        for number in range(1, 6)
    ]
    digits = keras.layers.Dense(10, activation="softmax", name="digits")
    return keras.Sequential([keras.Input((784,)), *hidden, digits])


job = Job(
    model=build_model,
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
    train=Npz(MNIST, x="x_train", y="y_train", map=flatten),
    eval=Npz(MNIST, x="x_test", y="y_test", map=flatten),
    batch_size=50,
    epochs=2,
    mode="sync",
    replicas=2,
    devices=CUTS[cut],
)
