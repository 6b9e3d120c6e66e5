"""Digits through a bottleneck of 16 numbers, with noise added on the way in.

python examples/fit/autoencoder.py [--cluster]
"""

import contextlib
import json
import sys
from pathlib import Path

import keras
import numpy as np

import pserver

MNIST = Path(__file__).parent.parent / "data" / "mnist.npz"

keras.utils.set_random_seed(1)
with np.load(MNIST, allow_pickle=False) as data:
    x = data["x_train"][:6000].reshape(-1, 784).astype("float32") / 255

encoder = keras.Sequential(
    [
        keras.Input((784,)),
        keras.layers.GaussianNoise(0.2),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(16),
    ],
    name="encoder",
)
decoder = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(784, activation="sigmoid"),
    ],
    name="decoder",
)
pixels = keras.Input((784,))
autoencoder = keras.Model(pixels, decoder(encoder(pixels)), name="autoencoder")
autoencoder.compile(keras.optimizers.Adam(0.003), "binary_crossentropy", metrics=["mse"])

with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = autoencoder.fit(x, x, batch_size=64, epochs=5, validation_split=0.2, verbose=2)

# The parts share the trained weights.
codes = encoder.predict(x[-1000:], verbose=0)
print("codes", codes.shape, "of variance", codes.var(0).mean().round(2))
print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
