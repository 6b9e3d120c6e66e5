"""BatchNormalization and Dropout on made-up data that needs both its scales normalized."""

import keras
import numpy as np

from worker import Arrays, Job

rng = np.random.default_rng(11)
x = (rng.normal(size=(4000, 20)) * np.logspace(-1, 1, 20) + 3).astype("float32")
hidden = np.tanh((x - 3) / np.logspace(-1, 1, 20) @ rng.normal(size=(20, 16)))
y = (hidden @ rng.normal(size=(16, 5))).argmax(1).astype("int32")


def model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.BatchNormalization(name="scale"),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.BatchNormalization(momentum=0.9, name="again"),
            keras.layers.Dropout(0.2, name="drop"),
            keras.layers.Dense(5, name="logits"),
        ]
    )


job = Job(
    model=model,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.Adam(0.005),
    metrics=["accuracy"],
    train=Arrays(x[:3000], y[:3000]),
    eval=Arrays(x[3000:], y[3000:]),
    batch_size=30,
    epochs=8,
    replicas=2,
)
