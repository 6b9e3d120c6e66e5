"""The layer where it cannot be, and what a description says where it can."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from tests.worker.flat_jobs import RECORDS
from tests.worker.table_jobs import (
    BATCH,
    TableJobStepper,
    V,
    W,
    Weighed,
    described,
    make_job,
    some_ids,
)
from worker import Embedding, RowwiseAdagrad

pytestmark = pytest.mark.slow


class Rounded(Weighed):
    """Ids of parameters, and of rows."""

    def __init__(self, of: str) -> None:
        super().__init__(vocabulary=None)
        self.dense = keras.layers.Dense(1) if of == "parameters" else None

    def call(self, x: Any) -> Any:
        if self.dense is not None:
            ids = tf.cast(self.dense(tf.cast(x[:, tf.newaxis], tf.float32))[:, 0], tf.int64)
        else:
            ids = tf.cast(tf.round(self.rows(x)[..., 0]), tf.int64)
        return tf.reduce_sum(self.rows(ids), -1)


class Looped(Weighed):
    def call(self, x: Any) -> Any:
        return tf.map_fn(
            lambda ids: tf.reduce_sum(self.rows(ids)), x, fn_output_signature=tf.float32
        )


class Ignored(Weighed):
    def call(self, x: Any) -> Any:
        return tf.reduce_sum(tf.stop_gradient(self.rows(x)), -1)


def disagreeing() -> keras.Model:
    ids = keras.Input((), dtype="int64")
    one, other = Embedding(4, V, table="t", name="one"), Embedding(4, 8, table="t", name="other")
    return keras.Model(ids, keras.layers.Dot(1)([one(ids), other(ids)]))


def one_id_combined() -> keras.Model:
    ids = keras.Input((), dtype="int64")
    return keras.Model(ids, Embedding(W, V, combiner="mean", name="rows")(ids))


def named_as_its_input() -> keras.Model:
    ids = keras.Input((), dtype="int64", name="genres")
    return keras.Model(ids, keras.layers.Flatten()(Embedding(1, V, name="genres")(ids)))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (named_as_its_input, "\"genres\" is used 2 times.*worker.Embedding table='genres' names"),
        (lambda: Rounded("parameters"), "ids of layer 'rows' depend on parameters"),
        (lambda: Rounded("rows"), "ids of layer 'rows' depend on parameters, or on rows"),
        (Looped, "layer 'rows' is called inside of a loop"),
        (Ignored, r"does not depend on the rows of table 'rows'"),
        (disagreeing, "layers 'one' and 'other' both name table 't', but vocabulary is 7 in the"),
        (lambda: Weighed(lambda x: tf.cast(x, tf.float32)), "ids of dtype float32.*dtype='int64'"),
        (
            # Keras gives it floats, whatever the data is.
            lambda: keras.Sequential([Embedding(W, name="rows"), keras.layers.Flatten()]),
            "layer 'rows' was given ids of dtype float32.*a Sequential one too.*dtype='int64'",
        ),
        (lambda: Weighed(vocabulary=3), "first batch: record 11: layer 'rows' was given id"),
        (lambda: Weighed(optimizer="lion"), "optimizer Lion, which has no form for rows"),
        (lambda: Weighed(initializer="glorot_uniform"), "initializer GlorotUniform; rows are"),
        (
            lambda: Weighed(initializer=keras.initializers.Constant(float("inf"))),
            "initializer Constant with {'value': inf}; expected finite numbers",
        ),
        (lambda: Weighed(evict="age"), "evict='age', but no max_rows"),
        (lambda: Weighed(max_rows=9, keep_evicted=True), "has keep_evicted, but no evict"),
        (lambda: Weighed(vocabulary=None, out_of_vocabulary="clip"), "but no vocabulary"),
        (lambda: Weighed(combiner="max"), "combiner 'max'; expected 'sum'"),
        (lambda: Weighed(min_count=0), "min_count 0; expected a whole number"),
        (lambda: Weighed(padding="x"), "padding='x', but was given numbers"),
        (lambda: Weighed(mask_zero=True), "has mask_zero, as keras.layers.*here say padding=0"),
        (lambda: Weighed(input_dim=9), "has input_dim, as keras.layers.*here say vocabulary"),
        (one_id_combined, "layer 'rows' was given a scalar; there is nothing to combine"),
    ],
)
def test_impossible_tables_are_refused_when_the_job_is_described(
    model: Callable[[], Any], why: str
) -> None:
    with pytest.raises(InvalidJob, match=why):
        described(make_job(model, some_ids()))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"local_steps": 2}, "local_steps is 2, but the model has embedding tables"),
        (
            {"dense": "allreduce", "mode": "sync", "replicas": 2},
            "dense is 'allreduce', but the model has embedding tables alone.*say dense='shards'",
        ),
        ({"delay_compensation": "constant"}, "delay_compensation is 'constant', but the model"),
        ({"optimizer": keras.optimizers.Lion()}, "Lion.*the job's optimizer: give layer 'rows'"),
        ({"optimizer": keras.optimizers.SGD(global_clipnorm=1.0)}, "global_clipnorm"),
    ],
)
def test_settings_that_are_not_for_tables_are_refused(fields: dict[str, Any], why: str) -> None:
    engine = "keras" if "optimizer" in fields else "numpy"
    with pytest.raises(InvalidJob, match=why):
        described(make_job(Weighed, some_ids(), engine=engine, **fields))


def test_a_missing_value_is_named_in_whatever_batch_it_is() -> None:
    """Data that has one is float, and no number of its own would be left of it."""

    def model() -> keras.Model:
        ids = keras.Input((), dtype="int64", name="ids")
        return keras.Model(ids, keras.layers.Dense(1)(Embedding(W, None, name="rows")(ids)))

    ids = some_ids().astype(np.float64)
    job = make_job(model, ids)
    assert described(job)
    ids[-1] = np.nan
    stepper = TableJobStepper(make_job(model, ids))
    refused = []
    for first in range(0, RECORDS, job.batch_size):
        batch = BatchId(0, first, min(job.batch_size, RECORDS - first))
        try:
            stepper.read(batch)
        except InvalidJob as error:
            refused.append(str(error))
    (why,) = refused
    assert re.search(r"the data of .*'ids' takes int64, and the data has float64, \[nan\]", why)


def test_outside_of_a_job_the_layer_says_that_it_has_no_rows() -> None:
    with pytest.raises(InvalidJob, match=r"layer 'rows' has no rows here.*coordinator export"):
        Weighed()(some_ids())


def test_a_description_has_the_tables_with_all_that_their_layers_say() -> None:
    def model() -> keras.Model:
        return Weighed(
            optimizer=RowwiseAdagrad(learning_rate=0.25),
            initializer=keras.initializers.RandomNormal(stddev=0.5),
            vocabulary=None,
            min_count=3,
            max_rows=1000,
            evict="frequency",
            keep_evicted=True,
            table="words",
        )

    found = described(make_job(model, some_ids(), seed=5))
    (table,) = found.tables
    assert (table.name, table.width, table.vocabulary, table.seed) == ("words", W, None, 5)
    assert (table.min_count, table.max_rows, table.eviction) == (3, 1000, "frequency")
    assert table.keep_evicted
    assert table.initializer == {"class_name": "normal", "config": {"mean": 0.0, "stddev": 0.5}}
    assert table.optimizer["class_name"] == "RowwiseAdagrad"
    assert table.optimizer["config"]["learning_rate"] == 0.25
    assert 0 < found.rows_nbytes <= BATCH * W * 4 + 64
    assert found.variables == ()


def test_a_layer_is_made_anew_from_its_config() -> None:
    layer = Embedding(
        W,
        V,
        combiner="sqrtn",
        optimizer=keras.optimizers.Adam(0.1),
        initializer=keras.initializers.Constant(2.0),
        padding=0,
        out_of_vocabulary="drop",
        name="rows",
    )
    again = Embedding.from_config(layer.get_config())
    assert again.options == layer.options
    assert again.get_config() == layer.get_config()
