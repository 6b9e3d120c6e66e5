"""Short reviews as strings: the words are looked up in the model itself.

python examples/fit/text_classification.py [--cluster]
"""

import contextlib
import json
import random
import sys

import keras
import numpy as np
import tensorflow as tf

import pserver

GOOD = ["lovely", "bright", "clever", "warm", "funny", "gripping", "tender", "sharp"]
BAD = ["dull", "noisy", "flat", "tedious", "clumsy", "cold", "loud", "hollow"]
OTHER = ["the", "film", "a", "plot", "its", "cast", "and", "music", "one", "scene", "that", "ends"]

draw = random.Random(0)


def review(good: bool) -> str:
    """Returns a dozen words, of which those that judge are more often of one kind."""
    mixed = draw.choices(GOOD if good else BAD, k=2) + draw.choices(GOOD + BAD, k=4)
    said = mixed + draw.choices(OTHER, k=8)
    draw.shuffle(said)
    return " ".join(said).capitalize() + draw.choice(".!?")


keras.utils.set_random_seed(1)
y = np.array([draw.randrange(2) for _ in range(3000)])
x = tf.constant([review(bool(label)) for label in y])

lookup = keras.layers.TextVectorization(max_tokens=60, output_sequence_length=14)
lookup.adapt(x)
model = keras.Sequential(
    [
        keras.Input((1,), dtype="string"),
        lookup,
        keras.layers.Embedding(60, 8),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy", "auc"])

with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = model.fit(x, y, epochs=4, validation_split=0.2, verbose=2)

print(model.predict(tf.constant(["A tender film with a clever plot"]), verbose=0))
print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
