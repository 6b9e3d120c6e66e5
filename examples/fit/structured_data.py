"""A table with columns of words and numbers: which parcels are late?

python examples/fit/structured_data.py [--cluster]      (needs pandas)
"""

import contextlib
import json
import sys

import keras
import numpy as np
import pandas as pd
import tensorflow as tf

import pserver

CARRIERS, RECORDS = ["van", "bike", "rail"], 4000

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
table = pd.DataFrame(
    {
        "carrier": draw.choice(CARRIERS, RECORDS),
        "kilometres": draw.gamma(2.0, 60.0, RECORDS),
        "kilograms": draw.gamma(1.5, 4.0, RECORDS),
        "weekday": draw.integers(0, 7, RECORDS),
    }
)
delay = table["kilometres"] / 60 + table["kilograms"] / 8 * (table["carrier"] == "bike")
delay += 1.5 * (table["weekday"] == 6) + draw.logistic(0, 0.7, RECORDS)
table["late"] = (delay > 3).astype(int)
late = table.pop("late")
rows = tf.data.Dataset.from_tensor_slices((dict(table), late)).batch(32)

layers = keras.layers
inputs = {name: keras.Input((1,), name=name, dtype="float32") for name in table}
inputs["carrier"] = keras.Input((1,), name="carrier", dtype="string")
inputs["weekday"] = keras.Input((1,), name="weekday", dtype="int64")
carrier = layers.StringLookup(vocabulary=CARRIERS, output_mode="one_hot")
parts = [carrier(inputs["carrier"])]
parts.append(layers.CategoryEncoding(7, output_mode="one_hot")(inputs["weekday"]))
for name in ("kilometres", "kilograms"):
    normalization = layers.Normalization(axis=None)
    normalization.adapt(table[name].to_numpy())
    parts.append(normalization(inputs[name]))
hidden = layers.Dense(32, activation="relu")(layers.Concatenate()(parts))
model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])

stopping = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = model.fit(
        rows.skip(25).shuffle(100),
        epochs=8,
        validation_data=rows.take(25),
        class_weight={0: 1.0, 1: 1.2},
        callbacks=[stopping],
        verbose=2,
    )

print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
