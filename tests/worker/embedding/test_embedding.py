"""The layer in all kinds of models, against tables that are held whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from psrpc.core.tables import hashed
from tests.worker.flat_jobs import FIRST, RECORDS
from tests.worker.table_jobs import (
    BATCH,
    WEIGHTS,
    TableJobStepper,
    V,
    W,
    Weighed,
    check_gradients,
    make_job,
    some_ids,
)
from worker import Embedding
from worker.embedding.embedding import string_ids

pytestmark = pytest.mark.slow


def as_ragged(x: Any) -> Any:
    return tf.RaggedTensor.from_tensor(x, padding="" if x.dtype == tf.string else 0)


def combined(combiner: str, tables: Mapping[str, Any], x: Any) -> Any:
    """A combiner's result for ids that are not 0, those at the end of a record."""
    there = tf.cast(x != 0, tf.float32)
    rows = tf.gather(tables["rows"], x) * there[..., tf.newaxis]
    count = tf.maximum(tf.reduce_sum(there, -1), 1)
    by = {"sum": tf.ones_like(count), "mean": count, "sqrtn": tf.sqrt(count)}[combiner]
    return tf.reduce_sum(tf.reduce_sum(rows, -2) / by[:, tf.newaxis] * WEIGHTS, -1)


def multi_valued() -> Any:
    """Ids 1 to V - 1, 0 to 4 of them a record, zeros after them."""
    ids = some_ids(4, low=1)
    count = np.arange(RECORDS) % 5
    return np.where(np.arange(4) < count[:, np.newaxis], ids, 0)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["padded", "ragged", "sparse"])
def test_combiners_make_one_vector_of_several_ids(kind: str, combiner: str) -> None:
    prepare: dict[str, Any] = {"padded": None, "ragged": as_ragged, "sparse": tf.sparse.from_dense}
    padding = 0 if kind == "padded" else None

    def model() -> keras.Model:
        return Weighed(prepare[kind], combiner=combiner, padding=padding)

    stepper = TableJobStepper(make_job(model, multi_valued()))
    found = check_gradients(stepper, lambda tables, x: combined(combiner, tables, x))
    # The padding is never looked up.
    assert np.isnan(found["rows"][0]).all()
    # The number of ids is another in each batch, and needs no other trace.
    stepper.run(type(FIRST)(0, BATCH, BATCH))
    assert len(stepper.step._traces) == 1


@pytest.mark.parametrize("prepare", [as_ragged, tf.sparse.from_dense])
def test_words_are_combined_like_numbers(prepare: Callable[[Any], Any]) -> None:
    def as_words(x: Any) -> Any:
        return tf.where(x == 0, "", tf.strings.as_string(x))

    def model() -> keras.Model:
        return Weighed(lambda x: prepare(as_words(x)), combiner="sqrtn")

    def forward(tables: Mapping[str, Any], x: Any) -> Any:
        there = tf.cast(x != 0, tf.float32)
        rows = tf.gather(tables["rows"], string_ids(as_words(x), V)) * there[..., tf.newaxis]
        count = tf.sqrt(tf.maximum(tf.reduce_sum(there, -1), 1))
        return tf.reduce_sum(tf.reduce_sum(rows, -2) / count[:, tf.newaxis] * WEIGHTS, -1)

    check_gradients(TableJobStepper(make_job(model, multi_valued())), forward)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_ids_of_a_dense_tensor_are_combined_like_those_of_keras(combiner: str) -> None:
    x = some_ids(3, low=1)
    stepper = TableJobStepper(make_job(lambda: Weighed(combiner=combiner), x))
    check_gradients(stepper, lambda tables, ids: combined(combiner, tables, ids))


def test_ragged_rows_without_a_combiner_stay_ragged() -> None:
    class Ragged(Weighed):
        def call(self, x: Any) -> Any:
            rows = self.rows(as_ragged(x))
            assert isinstance(rows, tf.RaggedTensor)
            return tf.reduce_sum(tf.reduce_sum(rows, 1) * WEIGHTS, -1)

    stepper = TableJobStepper(make_job(Ragged, multi_valued()))
    check_gradients(stepper, lambda tables, x: combined("sum", tables, x))


def functional() -> keras.Model:
    """Matrix factorization; the table of films is shared by two layers."""
    ids = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "film", "other")}
    films = [Embedding(W, table="films", name=name) for name in ("film_row", "other_row")]
    user = Embedding(W, V, name="users")(ids["user"])
    both = films[0](ids["film"]) + 2 * films[1](ids["other"])
    return keras.Model(ids, keras.layers.Dot(1)([user, both]))


def factorized(tables: Mapping[str, Any], x: Any) -> Any:
    both = tf.gather(tables["films"], x["film"]) + 2 * tf.gather(tables["films"], x["other"])
    return tf.reduce_sum(tf.gather(tables["users"], x["user"]) * both, -1)


def test_gradients_of_ids_that_come_twice_are_summed_over_layers_that_share_a_table() -> None:
    x = {"user": some_ids(), "film": some_ids(high=5), "other": some_ids(high=5)[::-1].copy()}
    stepper = TableJobStepper(make_job(functional, x), shards=3)
    check_gradients(stepper, factorized)
    assert {table.name: table.vocabulary for table in stepper.plan.tables} == {
        "users": V,
        "films": None,
    }


def test_a_layer_that_is_called_twice_in_a_sequential_model() -> None:
    def model() -> keras.Model:
        inner = keras.Sequential([keras.Input((2,), dtype="int32"), Embedding(W, V, name="rows")])
        ids = keras.Input((4,), dtype="int32")
        first, last = inner(ids[:, :2]), inner(ids[:, 2:])
        return keras.Sequential(
            [keras.Model(ids, first * last), keras.layers.Flatten(), keras.layers.Dense(1)]
        )

    stepper = TableJobStepper(make_job(model, some_ids(4).astype(np.int32)))
    kernel = tf.constant(stepper.replica.model.trainable_variables[0].numpy())

    def forward(tables: Mapping[str, Any], x: Any) -> Any:
        rows = tf.gather(tables["rows"], x)
        return tf.reshape(rows[:, :2] * rows[:, 2:], [len(x), -1]) @ kernel

    check_gradients(stepper, forward)


def test_an_id_may_be_hashed_or_follow_from_the_batch_in_other_ways() -> None:
    def prepare(x: Any) -> Any:
        return tf.abs(x * 3 + tf.range(2, dtype=tf.int64)) % V

    stepper = TableJobStepper(make_job(lambda: Weighed(prepare, combiner="sum"), some_ids(2)))

    def forward(tables: Mapping[str, Any], x: Any) -> Any:
        return tf.reduce_sum(tf.gather(tables["rows"], prepare(x)) * WEIGHTS, [-2, -1])

    check_gradients(stepper, forward)


def test_strings_are_hashed_into_the_vocabulary_and_empty_ones_dropped() -> None:
    words = np.array(["", "a", "b", "ä", "the"])[some_ids(3, high=5)]

    def model() -> keras.Model:
        return Weighed(combiner="sum", padding="")

    stepper = TableJobStepper(make_job(model, words))

    def forward(tables: Mapping[str, Any], x: Any) -> Any:
        there = tf.cast(tf.constant(x) != "", tf.float32)[..., tf.newaxis]
        rows = tf.gather(tables["rows"], string_ids(x, V)) * there
        return tf.reduce_sum(rows * WEIGHTS, [-2, -1])

    check_gradients(stepper, forward)


@pytest.mark.parametrize("dtype", ["int64", "string"])
def test_padding_is_masked_for_the_layers_that_follow(dtype: str) -> None:
    count = 1 + np.arange(RECORDS) % 4
    x = np.where(np.arange(4) < count[:, np.newaxis], some_ids(4, low=1), 0)
    padding = "0" if dtype == "string" else 0

    def model() -> keras.Model:
        ids = keras.Input((4,), dtype=dtype)
        rows = Embedding(W, V, padding=padding, name="rows")(ids)
        mean = keras.layers.GlobalAveragePooling1D()(rows)
        return keras.Model(ids, keras.ops.sum(mean * WEIGHTS, -1))

    def forward(tables: Mapping[str, Any], x: Any) -> Any:
        there = tf.cast(x != padding, tf.float32)[..., tf.newaxis]
        rows = tf.gather(tables["rows"], string_ids(x, V) if dtype == "string" else x) * there
        return tf.reduce_sum(tf.reduce_sum(rows, 1) / tf.reduce_sum(there, 1) * WEIGHTS, -1)

    check_gradients(
        TableJobStepper(make_job(model, x.astype(str) if dtype == "string" else x)), forward
    )


def test_the_hash_of_a_string_never_changes() -> None:
    found = string_ids(["a", "", "ä"]).numpy().tolist()
    assert found == [3694432073954588156, 1936946117179621480, 707521742561851175]
    assert string_ids(["a", "", "ä"], 1000).numpy().tolist() == [939, 263, 175]


def test_strings_have_the_same_ids_without_tensorflow() -> None:
    """Of any length: FarmHash has a formula for each of five ranges."""
    random = np.random.default_rng(0)
    strings = [random.bytes(length) for length in range(300)]
    for vocabulary in (None, 1, 1000, 2**62 + 1):
        expected = string_ids(strings, vocabulary).numpy()
        np.testing.assert_array_equal(hashed(strings, vocabulary), expected)
    expected = string_ids([b"\xc3\xa4", b"\xe4", b""]).numpy()
    np.testing.assert_array_equal(hashed(["ä", "\udce4", ""]), expected)


def test_dropped_and_clipped_ids() -> None:
    x = some_ids(3, low=-3, high=V + 3)

    def mean(tables: Mapping[str, Any], x: Any) -> Any:
        there = tf.cast((x >= 0) & (x < V), tf.float32)
        rows = tf.gather(tables["rows"], np.clip(x, 0, V - 1)) * there[..., tf.newaxis]
        count = tf.maximum(tf.reduce_sum(there, -1), 1)[:, tf.newaxis]
        return tf.reduce_sum(tf.reduce_sum(rows, -2) / count * WEIGHTS, -1)

    check_gradients(
        TableJobStepper(make_job(lambda: Weighed(combiner="mean", out_of_vocabulary="drop"), x)),
        mean,
    )

    def total(tables: Mapping[str, Any], x: Any) -> Any:
        rows = tf.gather(tables["rows"], np.clip(x, 0, V - 1))
        return tf.reduce_sum(rows * WEIGHTS, [-2, -1])

    check_gradients(
        TableJobStepper(make_job(lambda: Weighed(combiner="sum", out_of_vocabulary="clip"), x)),
        total,
    )


def test_a_batch_may_have_no_id_at_all() -> None:
    stepper = TableJobStepper(make_job(lambda: Weighed(combiner="sum", padding=0), some_ids(2) * 0))
    result = stepper.run()
    assert result.finite
    assert result.rows == ({}, {})


def test_an_id_that_is_not_in_the_vocabulary_fails_the_job_by_name() -> None:
    x = some_ids(2)
    job = make_job(lambda: Weighed(combiner="sum"), x)
    stepper = TableJobStepper(job)
    x[:] = V
    with pytest.raises(
        InvalidJob, match=r"epoch 1.*layer 'rows' was given id 7, which table 'rows'"
    ):
        stepper.read(FIRST)


def test_a_module_may_use_the_layer() -> None:
    class Module(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = tf.Variable(2.0)
            self.rows = Embedding(W, V, name="rows")

    def loss(module: Any, x: Any, y: Any) -> Any:
        rows = module.rows(x)
        # AutoGraph makes conditions of these.
        if tf.reduce_sum(rows) > 1e9:
            rows *= 2.0
        return tf.reduce_mean(tf.square(module.scale * tf.reduce_sum(rows * WEIGHTS, -1) - y))

    stepper = TableJobStepper(make_job(Module, some_ids(), loss=loss))

    def forward(tables: Mapping[str, Any], x: Any) -> Any:
        return 2 * tf.reduce_sum(tf.gather(tables["rows"], x) * WEIGHTS, -1)

    check_gradients(stepper, forward)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_computes_in_16_bits_and_sends_32(dtype: str) -> None:
    stepper = TableJobStepper(make_job(lambda: Weighed(dtype=f"mixed_{dtype}"), some_ids()))
    assert stepper.replica.model.rows.compute_dtype == dtype

    def forward(tables: Mapping[str, Any], x: Any) -> Any:
        return tf.reduce_sum(tf.gather(tables["rows"], x) * WEIGHTS, -1)

    check_gradients(stepper, forward, rtol=0.1)


def test_a_row_that_is_not_finite_skips_the_batch() -> None:
    stepper = TableJobStepper(make_job(lambda: Weighed(combiner="sum"), some_ids(2)))
    assert stepper.run().finite
    for table in stepper.tables.values():
        table[:] = np.inf
    result = stepper.run()
    assert not result.finite
    assert result.rows == ()


def test_nothing_but_what_leads_to_ids_is_run_to_find_them() -> None:
    seen: list[int] = []

    class Watched(Weighed):
        def call(self, x: Any) -> Any:
            rows = self.rows(x)
            tf.py_function(lambda values: seen.append(len(values)), [rows], [])
            return tf.reduce_sum(rows * WEIGHTS, -1)

    stepper = TableJobStepper(make_job(Watched, some_ids()))
    seen.clear()
    stepper.read(FIRST)
    assert seen == []
