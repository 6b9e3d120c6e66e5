"""Keras's own Embedding where a batch has an id several times, as docs/keras.md tells it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from tests.worker.flat_jobs import JobStepper, make_job
from worker import Arrays

pytestmark = pytest.mark.slow
layers = keras.layers

RECORDS, IDS = 16, 5
GENERATOR = np.random.default_rng(0)
X = GENERATOR.integers(0, IDS, (RECORDS, 20))
Y = GENERATOR.integers(0, 3, RECORDS)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def bag() -> keras.Model:
    ids = keras.Input((20,), dtype="int64")
    rows = layers.Embedding(IDS, 4, name="rows")(ids)
    return keras.Model(ids, layers.Dense(3)(layers.GlobalAveragePooling1D()(rows)))


def gradient(model: keras.Model) -> Any:
    """Of the embedding, as Keras has it: one for each time that an id comes."""
    with tf.GradientTape() as tape:
        loss = LOSS(Y, model(X))
    found = tape.gradient(loss, model.get_layer("rows").embeddings.value)
    assert isinstance(found, tf.IndexedSlices)
    return found


def test_shards_get_the_sum_of_the_gradients_of_an_id() -> None:
    stepper = JobStepper(make_job(bag, loss=LOSS, train=Arrays(X, Y), eval=None))
    found = stepper.by_variable(stepper.run(BatchId(0, 0, RECORDS)))
    [ours] = [value for name, value in found.items() if "rows" in name]
    expected = tf.convert_to_tensor(gradient(stepper.replica.model))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-8)


def test_fit_adds_the_squares_of_each() -> None:
    """Where this fails Keras has changed, and so must the page."""
    model = bag()
    found = gradient(model)
    sum_of_squares = np.zeros((IDS, 4), np.float32)
    flat = np.reshape(found.values, (-1, 4))
    np.add.at(sum_of_squares, np.ravel(found.indices), flat**2)
    square_of_sum = np.square(tf.convert_to_tensor(found))
    model.compile(keras.optimizers.Adam(beta_2=0.5), LOSS)
    model.fit(X, Y, batch_size=RECORDS, verbose=0)
    [kept] = [v for v in model.optimizer.variables if "rows" in v.path and "velocity" in v.path]
    np.testing.assert_allclose(kept.numpy(), 0.5 * sum_of_squares, rtol=1e-4)
    assert not np.allclose(kept.numpy(), 0.5 * square_of_sum, rtol=0.1)
