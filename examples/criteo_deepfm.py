"""Clicks on advertisements predicted by DeepFM (Guo et al. 2017), with one table for all ids.

coordinator up examples/criteo_deepfm.py --shards 4 --workers 2

Without data it trains on made-up clicks (``criteo.truth``), whose best possible AUC is known:

python -m examples.criteo.generate --first 2400000     # of what the job evaluates on

Criteo's own file works alike; its last records are evaluated on:

coordinator up examples/criteo_deepfm.py --shards 4 --set data=train.txt --set eval_rows=1000000

``--set rows=N`` trains on the first N records alone.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from criteo.records import CATEGORICAL, NUMERIC  # type: ignore[import-not-found]  # beside this
from criteo.truth import Truth  # type: ignore[import-not-found]
from criteo.tsv import TsvFile  # type: ignore[import-not-found]

from pserver import Batch, Embedding, Function, Job, RowwiseAdagrad, setting
from psrpc.core.errors import InvalidJob

FACTORS = 8
HIDDEN = (64, 64)

data = setting("data", "")
truth_seed = setting("truth_seed", 1)
rows = setting("rows", 0 if data else 2_400_000)
eval_rows = setting("eval_rows", 100_000)


class FieldVectors(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Of each number ``[n, fields]`` a vector ``[n, fields, width]``: the number times the vector
    of its field, which is learned."""

    def __init__(self, width: int, **layer: Any) -> None:
        super().__init__(**layer)
        self._width = width

    def build(self, shape: Any) -> None:
        self.vectors = self.add_weight(
            shape=(shape[-1], self._width),
            initializer=keras.initializers.RandomNormal(stddev=0.01),
            name="vectors",
        )

    def call(self, numbers: tf.Tensor) -> tf.Tensor:
        return numbers[:, :, tf.newaxis] * self.vectors


class Pairs(keras.layers.Layer):  # type: ignore[misc]
    """The sum of the products of all pairs of vectors, ``[n, fields, width]`` to ``[n, 1]`` (Rendle
    2010, "Factorization Machines", lemma 3.1)."""

    def call(self, vectors: tf.Tensor) -> tf.Tensor:
        squares = tf.square(tf.reduce_sum(vectors, 1)) - tf.reduce_sum(tf.square(vectors), 1)
        return tf.reduce_sum(squares, -1, keepdims=True) / 2


def build_model() -> keras.Model:
    """The logit is linear in all fields, plus all pairs of their vectors, plus a network that has
    all vectors as its input."""
    layers = keras.layers
    inputs = {
        "numeric": keras.Input((NUMERIC,), name="numeric"),
        "categorical": keras.Input((CATEGORICAL,), dtype="int64", name="categorical"),
    }
    # One table for all fields, whose ids differ, and one row for both the linear weight of an id
    # and its vector: a step asks each shard for one list of ids.
    found = Embedding(
        1 + FACTORS,
        initializer=keras.initializers.RandomNormal(stddev=0.01),
        optimizer=RowwiseAdagrad(learning_rate=0.04, initial_accumulator_value=1e-7),
        name="categories",
    )(inputs["categorical"])
    linear = keras.ops.sum(found[:, :, 0], axis=1, keepdims=True)
    vectors = layers.Concatenate(axis=1)(
        [found[:, :, 1:], FieldVectors(FACTORS)(inputs["numeric"])]
    )
    deep = layers.Flatten()(vectors)
    for units in HIDDEN:
        deep = layers.Dense(units, activation="relu")(deep)
    parts = [linear, layers.Dense(1)(inputs["numeric"]), Pairs()(vectors), layers.Dense(1)(deep)]
    return keras.Model(inputs, layers.Activation("sigmoid")(layers.Add()(parts)))


def sources() -> tuple[Function, Function]:
    """Data for training, and after it in the data those for evaluation."""
    if data:
        file = TsvFile(data)
        left = file.num_records - eval_rows
        count = min(rows, left) if rows else left
        if count < 1:
            raise InvalidJob(
                f"{data!r} has {file.num_records} records, eval_rows is {eval_rows}; none is left "
                "to train on: give a larger file, or say --set eval_rows=N with a smaller N"
            )
        content = file.fingerprint()

        def make(start: int, stop: int) -> Batch:
            batch: Batch = file.records(start, stop).batch()
            return batch

    else:
        truth = Truth(truth_seed)
        count, content = rows, f"truth {truth_seed}"

        def make(start: int, stop: int) -> Batch:
            records, _ = truth.records(start, stop)
            batch: Batch = records.batch()
            return batch

    def after(start: int, stop: int) -> Batch:
        return make(count + start, count + stop)

    return (
        Function(make, count, block_records=16_384, content=content),
        Function(after, eval_rows, content=content),
    )


train, evaluation = sources()

job = Job(
    model=build_model,
    loss="binary_crossentropy",
    metrics=[keras.metrics.AUC(num_thresholds=1000, name="auc")],
    optimizer=keras.optimizers.Adam(0.002),
    train=train,
    eval=evaluation,
    batch_size=4096,
    mode="async",
)
