"""Ratings of films, predicted from who rates what alone: MovieLens 100K in seconds.

coordinator up examples/movielens.py --shards 2 --workers 2 --set data=ml-100k/u.data

``--set network=towers`` trains two towers instead of a matrix factorization, ``--mode sync
--replicas 2`` trains either synchronously. A tenth of the ratings, drawn by a seed, is held out;
``rmse`` is the error on them.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from ratings import Ratings, load_ratings  # type: ignore[import-not-found]  # beside this file

from pserver import Arrays, Embedding, Job, setting
from psrpc.core.errors import InvalidJob

FACTORS = 32
L2 = 0.1
"""Weight of the squares of what a rating used: of its user's row and of its item's."""

train, test = load_ratings(setting("data", "")).split(share=0.1, seed=0)
users, items = (
    1 + int(max(ids.max() for ids in both))
    for both in ((train.users, test.users), (train.items, test.items))
)


class Shrink(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Adds the mean square length of its input ``[n, width]`` to the loss."""

    def call(self, rows: tf.Tensor) -> tf.Tensor:
        self.add_loss(L2 * tf.reduce_mean(tf.reduce_sum(tf.square(rows), axis=-1)))
        return rows


class Mean(keras.layers.Layer):  # type: ignore[misc]
    """Adds one number, learned, to its input."""

    def build(self, _shape: Any) -> None:
        self.mean = self.add_weight(shape=(), initializer=keras.initializers.Constant(3.5))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.mean


def embed(ids: Any, vocabulary: int, name: str) -> tuple[Any, Any]:
    """Of each id ``[n]`` a bias ``[n, 1]`` and a vector ``[n, FACTORS]``: a row of one table."""
    normal = keras.initializers.RandomNormal(stddev=0.05)
    rows = Shrink()(Embedding(1 + FACTORS, vocabulary, initializer=normal, name=name)(ids))
    return rows[:, :1], rows[:, 1:]


def build_model(towers: bool) -> keras.Model:
    """Biases and the product of two vectors (Koren, Bell and Volinsky 2009); with ``towers`` two
    dense layers stand between a row and its vector."""
    layers = keras.layers
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    biases, vectors = [], []
    for name, vocabulary in (("user", users), ("item", items)):
        bias, vector = embed(inputs[name], vocabulary, f"{name}s")
        if towers:
            vector = layers.Dense(FACTORS, activation="relu", name=f"{name}_hidden")(vector)
            vector = layers.Dense(FACTORS, name=f"{name}_tower")(vector)
        biases.append(bias)
        vectors.append(vector)
    return keras.Model(inputs, Mean()(layers.Add()([*biases, layers.Dot(axes=1)(vectors)])))


def arrays(ratings: Ratings) -> Arrays:
    return Arrays({"user": ratings.users, "item": ratings.items}, ratings.stars[:, None])


network = setting("network", "factors")
if network not in ("factors", "towers"):
    raise InvalidJob(f"--set network={network}: expected factors or towers")

job = Job(
    model=lambda: build_model(network == "towers"),
    loss="mse",
    metrics=[keras.metrics.RootMeanSquaredError(name="rmse")],
    # Tables without an optimizer of their own have the job's.
    optimizer=keras.optimizers.Adam(0.001 if network == "towers" else 0.005),
    train=arrays(train),
    eval=arrays(test),
    batch_size=200,
    epochs=6 if network == "towers" else 8,
    mode="async",
)
