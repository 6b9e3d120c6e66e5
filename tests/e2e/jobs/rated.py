"""Ratings of baskets of three things: ids of a growing table, and a dense layer on their rows.

Two layers share the table: one takes the first id of a record, one the others. So an id may come
several times in a record, in a batch, and in both layers. Beside it the rows of other tables, each
with an optimizer of its own, learn the same ratings by themselves.

The workers wait where a test wants to look at them, as those of ``gated.py`` do. Every random
number has a seed of its own, so ``tests.e2e.plain_table_loop`` builds the same network on a whole
table.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pserver import Arrays, Embedding, Job, RowwiseAdagrad
from tests.e2e.gated_arrays import GatedArrays

WIDTH, THINGS = 4, 300
INITIAL = 0.1
RATE, MOMENTUM = 0.05, 0.5

OTHERS = {
    "adagrad": keras.optimizers.Adagrad(0.1),
    "adam": keras.optimizers.Adam(0.02),
    "ftrl": keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.001),
    "rowwise": RowwiseAdagrad(learning_rate=0.1),
}
"""The other tables, by name."""

rng = np.random.default_rng(5)
names = rng.integers(-(2**63), 2**63 - 1, THINGS)
"""Ids of the things, all over int64."""

x = names[rng.zipf(1.3, size=(1230, 3)) % THINGS]
worth = rng.normal(size=THINGS).astype("float32")
y = worth[np.searchsorted(np.sort(names), x)].sum(1, keepdims=True)


def network(
    first: Callable[[Any], Any],
    rest: Callable[[Any], Any] | None = None,
    others: Sequence[Embedding] = (),
) -> keras.Model:
    """A rating by the layers that share a table, or by one, then one by each of the others."""
    rest = rest or first
    ids = keras.Input((3,), dtype="int64")
    rows = keras.layers.Concatenate(axis=1)([first(ids[:, :1]), rest(ids[:, 1:])])
    start = keras.initializers.GlorotUniform(seed=3)
    out = keras.layers.Dense(1, kernel_initializer=start, name="out")
    ratings = [out(keras.layers.Flatten()(rows))]
    ratings += [keras.ops.sum(other(ids), axis=-1, keepdims=True) for other in others]
    return keras.Model(ids, keras.ops.concatenate(ratings, axis=-1))


def model() -> keras.Model:
    initial = keras.initializers.Constant(INITIAL)
    first, rest = (
        Embedding(WIDTH, initializer=initial, table="things", name=name)
        for name in ("first", "rest")
    )
    others = [
        Embedding(2, combiner="sum", optimizer=optimizer, name=name)
        for name, optimizer in OTHERS.items()
    ]
    return network(first, rest, others)


def loss(truth: Any, ratings: Any) -> Any:
    """Each rating has an error of its own, so none changes the gradients of another."""
    return tf.reduce_mean(tf.reduce_sum(tf.square(ratings - truth), -1))


job = Job(
    model=model,
    loss=loss,
    optimizer=keras.optimizers.SGD(RATE, momentum=MOMENTUM),
    train=GatedArrays(x, y),
    eval=Arrays(x[:500], y[:500]),
    batch_size=20,
    epochs=3,
    replicas=3,
    engine="numpy",
    intra_op_threads=1,
)
