"""Support tickets: from their words and some numbers, the department and the hours they take.

python examples/fit/two_inputs_two_outputs.py [--cluster]
"""

import contextlib
import json
import sys

import keras
import numpy as np

import pserver

RECORDS, WORDS, NUMBERS, DEPARTMENTS = 4000, 60, 5, 4

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
words = (draw.random((RECORDS, WORDS)) < 0.1).astype("float32")
numbers = draw.normal(size=(RECORDS, NUMBERS)).astype("float32")
department = (words @ draw.normal(size=(WORDS, DEPARTMENTS))).argmax(1)
hours = 2 + numbers @ draw.normal(size=NUMBERS) + department + 0.3 * draw.normal(size=RECORDS)

of_words = keras.Input((WORDS,), name="words")
of_numbers = keras.Input((NUMBERS,), name="numbers")
both = keras.layers.Concatenate()(
    [
        keras.layers.Dense(32, activation="relu")(of_words),
        keras.layers.Dense(8, activation="relu")(of_numbers),
    ]
)
outputs = {
    "department": keras.layers.Dense(DEPARTMENTS, activation="softmax", name="department")(both),
    "hours": keras.layers.Dense(1, name="hours")(both),
}
model = keras.Model({"words": of_words, "numbers": of_numbers}, outputs)
model.compile(
    keras.optimizers.Adam(0.005),
    loss={"department": "sparse_categorical_crossentropy", "hours": "mse"},
    loss_weights={"department": 1.0, "hours": 0.2},
    metrics={"department": ["accuracy"], "hours": ["mae"]},
)

with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = model.fit(
        {"words": words, "numbers": numbers},
        {"department": department, "hours": hours.astype("float32")},
        epochs=8,
        validation_split=0.2,
        verbose=2,
    )

print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
