"""A day's temperatures, from which the next hour's follows; windows come from ``tf.data``.

python examples/fit/timeseries.py [--cluster]
"""

import contextlib
import json
import sys

import keras
import numpy as np

import pserver

HOURS, WINDOW, TRAINED = 4000, 24, 3200

keras.utils.set_random_seed(1)
hour = np.arange(HOURS)
draw = np.random.default_rng(0)
weather = np.convolve(draw.normal(size=HOURS), np.ones(12) / 12, mode="same")
degrees = np.sin(2 * np.pi * hour / 24) + np.sin(2 * np.pi * hour / 2000) + weather
clock = np.cos(2 * np.pi * hour / 24)
series = np.stack([degrees, clock], axis=1).astype("float32")


def windows(low: int, high: int, shuffle: bool) -> object:
    """Returns a dataset of windows of a day, and the hour that follows each."""
    return keras.utils.timeseries_dataset_from_array(
        series[low : high - WINDOW],
        series[low + WINDOW : high, :1],
        sequence_length=WINDOW,
        batch_size=64,
        shuffle=shuffle,
    )


model = keras.Sequential(
    [keras.Input((WINDOW, 2)), keras.layers.LSTM(16), keras.layers.Dense(1)],
)
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])

with pserver.Cluster(workers=2) if "--cluster" in sys.argv else contextlib.nullcontext():
    history = model.fit(
        windows(0, TRAINED, shuffle=True),
        epochs=4,
        validation_data=windows(TRAINED, HOURS, shuffle=False),
        verbose=2,
    )

print(json.dumps({name: round(values[-1], 4) for name, values in history.history.items()}))
