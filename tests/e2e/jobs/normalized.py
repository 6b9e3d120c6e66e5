"""BatchNormalization and Dropout on made-up data whose inputs differ in scale a hundredfold.

The classes have a margin between them, so a model that is trained well gets nearly all of them
right, and the accuracies of two well-trained models lie close together.
"""

import keras
import numpy as np

from pserver import Arrays, Job

rng = np.random.default_rng(11)
scales = np.logspace(-1, 1, 20)
z = rng.normal(size=(12_000, 20))
scores = z @ rng.normal(size=(20, 3))
clear = np.diff(np.sort(scores, 1))[:, 1] > 1.0
x = (z[clear] * scales + 3).astype("float32")
y = scores[clear].argmax(1).astype("int32")


def model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.BatchNormalization(momentum=0.9, name="scale"),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.BatchNormalization(momentum=0.9, name="again"),
            keras.layers.Dropout(0.2, name="drop"),
            keras.layers.Dense(3, name="logits"),
        ]
    )


job = Job(
    model=model,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.Adam(0.005),
    metrics=["accuracy"],
    train=Arrays(x[2000:], y[2000:]),
    eval=Arrays(x[:2000], y[:2000]),
    batch_size=40,
    epochs=4,
    replicas=2,
)
