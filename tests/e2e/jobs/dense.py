"""A small classifier on made-up data: quick enough to train whole in a test.

The labels are what a fixed random linear map says, so a model that learns gets them right. 1,230
records in batches of 20 leave a short last batch and a short last round.
"""

import keras
import numpy as np

from pserver import Arrays, Job

rng = np.random.default_rng(7)
x = rng.normal(size=(1230, 12)).astype("float32")
y = (x @ rng.normal(size=(12, 4))).argmax(1).astype("int32")


def model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(32, activation="tanh", name="hidden"),
            keras.layers.Dense(4, name="logits"),
        ]
    )


job = Job(
    model=model,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
    metrics=["accuracy"],
    train=Arrays(x, y),
    eval=Arrays(x[:500], y[:500]),
    batch_size=20,
    epochs=2,
    replicas=3,
    engine="numpy",
    intra_op_threads=1,
    checkpoint_every=40,
)
