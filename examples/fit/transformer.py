"""Sequences of tokens and a Transformer block: does a token come before another one?

python examples/fit/transformer.py [--cluster]
"""

import contextlib
import json
import sys
from typing import Any

import keras
import numpy as np

import pserver

TOKENS, LENGTH, WIDTH = 30, 16, 32
layers = keras.layers


class Positions(keras.layers.Layer):
    """Embeds tokens and adds an embedding of where they stand."""

    def __init__(self, tokens: int, length: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokens = tokens
        self.length = length
        self.width = width
        self.of_token = layers.Embedding(tokens, width)
        self.of_place = layers.Embedding(length, width)

    def call(self, x: Any) -> Any:
        return self.of_token(x) + self.of_place(keras.ops.arange(self.length))


keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
x = draw.integers(2, TOKENS, size=(4000, LENGTH))
places = np.array([draw.choice(LENGTH, 2, replace=False) for _ in x])
x[np.arange(len(x)), places[:, 0]] = 0
x[np.arange(len(x)), places[:, 1]] = 1
y = (places[:, 0] < places[:, 1]).astype("int32")

inputs = keras.Input((LENGTH,), dtype="int32")
hidden = Positions(TOKENS, LENGTH, WIDTH)(inputs)
attended = layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.1)(hidden, hidden)
hidden = layers.LayerNormalization()(hidden + attended)
forward = layers.Dense(WIDTH)(layers.Dense(64, activation="relu")(hidden))
hidden = layers.LayerNormalization()(hidden + forward)
pooled = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(hidden))
model = keras.Model(inputs, layers.Dense(2, activation="softmax")(pooled))
model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])

with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = model.fit(x, y, batch_size=64, epochs=6, validation_split=0.2, verbose=2)

print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
