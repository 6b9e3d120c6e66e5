"""A small classifier with BatchNormalization, whose workers wait where a test wants to look at
them."""

import keras
import numpy as np

from pserver import Arrays, Job
from tests.e2e.gated_arrays import GatedArrays

rng = np.random.default_rng(7)
x = rng.normal(size=(1230, 12)).astype("float32")
y = (x @ rng.normal(size=(12, 4))).argmax(1).astype("int32")


def model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(32, activation="tanh", name="hidden"),
            keras.layers.BatchNormalization(momentum=0.9, name="scale"),
            keras.layers.Dense(4, name="logits"),
        ]
    )


job = Job(
    model=model,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.SGD(0.02, momentum=0.9),
    metrics=["accuracy"],
    train=GatedArrays(x, y),
    eval=Arrays(x[:500], y[:500]),
    batch_size=20,
    epochs=3,
    replicas=3,
    engine="numpy",
    intra_op_threads=1,
)
