"""A residual network with batch normalization, on digits of half their size.

python examples/fit/resnet.py [--cluster]
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import pserver

MNIST = Path(__file__).parent.parent / "data" / "mnist.npz"
layers = keras.layers


def block(x: Any, filters: int, strides: int) -> Any:
    """Returns ``x`` after two convolutions, to which it is added itself."""
    shortcut = x
    if strides > 1:
        shortcut = layers.Conv2D(filters, 1, strides=strides, use_bias=False)(x)
        shortcut = layers.BatchNormalization(momentum=0.9)(shortcut)
    for stride, activation in ((strides, "relu"), (1, "linear")):
        x = layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.9)(x)
        x = layers.Activation(activation)(x)
    return layers.ReLU()(layers.Add()([x, shortcut]))


keras.utils.set_random_seed(1)
with np.load(MNIST, allow_pickle=False) as data:
    x = data["x_train"][:5000, ::2, ::2, np.newaxis].astype("float32") / 255
    y = data["y_train"][:5000]

inputs = keras.Input((14, 14, 1))
hidden = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
for filters, strides in ((8, 1), (16, 2), (32, 2)):
    hidden = block(hidden, filters, strides)
outputs = layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(hidden))
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])

with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = model.fit(x, y, batch_size=128, epochs=4, validation_split=0.2, verbose=2)

print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
