"""The flat step of models of all kinds: half precision, inputs by name, dtypes, modules."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidJob
from psrpc.core.placement import make_plan
from tests.worker.flat_jobs import (
    CLASSES,
    CPU,
    FEATURES,
    FIRST,
    RECORDS,
    JobStepper,
    Line,
    dense_model,
    line_loss,
    make_job,
    records,
    whole,
)
from worker import Arrays
from worker.data.source import Array
from worker.model.variables import model_variables
from worker.runtime.devices import ParameterBuffers
from worker.step.compute import BatchReader
from worker.step.flat import FlatStep
from worker.step.layout import Compressor
from worker.step.replica import Replica

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("wire", ["plain", "float16"])
def test_a_model_that_computes_in_half_precision(policy: str, wire: Encoding) -> None:
    def model() -> keras.Model:
        layers = [
            keras.layers.Dense(16, dtype=policy),
            keras.layers.BatchNormalization(dtype=policy),
            keras.layers.Dense(CLASSES, activation="softmax", dtype="float32"),
        ]
        return keras.Sequential([keras.Input((FEATURES,)), *layers])

    stepper = JobStepper(make_job(model), shards=3, wire=wire)
    assert {arena.dtype for arena in stepper.plan.arenas} == {"float32"}
    trained = stepper.replica.model
    # As they come, maybe rounded.
    assign(stepper, stepper.parameters.arrays["float32.trainable"].astype(np.float32))
    result = stepper.run(FIRST)
    x, y = stepper.job.train.read(stepper.job.seed, FIRST)
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy()(y, trained(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in trained.trainable_variables])
    assert result.finite
    assert result.loss == pytest.approx(float(loss), rel=1e-2)
    found = stepper.by_variable(result)
    for variable, gradient in zip(trained.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(found[variable.path], gradient, rtol=0.1, atol=0.02)


def assign(stepper: JobStepper, values: Array) -> None:
    """Gives the model the values of the trainable arena."""
    arena = stepper.plan.arenas[0]
    by_name = {v.path: v for v in stepper.replica.model.variables}
    for index, start in zip(arena.order, arena.starts, strict=True):
        spec = stepper.plan.variables[index]
        by_name[spec.name].assign(values[start : start + spec.size].reshape(spec.shape))


class Empty(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    """The only variable that may be rounded has no elements, the others are fewer than shards."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = tf.Variable(tf.zeros([0, 3]))
        self.double = tf.Variable(np.ones(2))
        self.count = tf.Variable(0.0, trainable=False)


def empty_loss(module: Empty, x: Any, _y: Any) -> Any:
    module.count.assign_add(2.0)
    double = tf.cast(tf.reduce_sum(module.double), tf.float32)
    return double * tf.reduce_mean(x) + tf.reduce_sum(module.nothing)


@pytest.mark.parametrize("wire", ["plain", "bfloat16", "float16"])
def test_arenas_without_elements_and_shards_without_a_part(wire: Encoding) -> None:
    x = np.ones(RECORDS, np.float32)
    job = make_job(Empty, loss=empty_loss, train=Arrays(x, x))
    stepper = JobStepper(job, shards=3, wire=wire)
    result = stepper.run(FIRST)
    assert result.finite
    found = stepper.by_variable(result)
    assert found["nothing"].shape == (0, 3)
    assert found["double"].tolist() == [1, 1]
    assert float(found["count"]) == 2
    assert [len(gradient["float64.trainable"].parts) for gradient in result.gradients] == [0, 0, 1]
    # It has nothing to compress; what others have travels as it is.
    compressed = Compressor(stepper.plan, "topk", 0.1).compress(result.gradients)
    assert compressed == result.gradients


class TwoInputs(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES, activation="softmax")

    def call(self, x: Any) -> Any:
        return self.dense(tf.concat([x["wide"], x["narrow"]], 1))


def test_inputs_by_name_reach_the_model_under_their_names() -> None:
    generator = np.random.default_rng(0)
    # Not in the order of the alphabet, and of one shape: a mistake would give other numbers.
    x = {name: generator.normal(size=(RECORDS, 4)).astype("f") for name in ("wide", "narrow")}
    stepper = JobStepper(
        make_job(TwoInputs, train=Arrays(x, generator.integers(0, CLASSES, RECORDS)))
    )
    first, again = stepper.run(FIRST), stepper.run(FIRST)
    rows, y = stepper.job.train.read(stepper.job.seed, FIRST)
    expected = keras.losses.SparseCategoricalCrossentropy()(y, stepper.replica.model(rows))
    assert first.loss == again.loss == pytest.approx(float(expected), rel=1e-5)


def test_an_error_in_the_step_names_the_users_code() -> None:
    job = make_job(dense_model, train=Arrays(records().read_range(0, 8)[0], np.full(8, 99)))
    stepper = JobStepper(job)
    for _ in range(2):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"(?s)test_flat.*label value of 99"
        ):
            stepper.run(FIRST)


class TwoTypes(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Integer inputs, a table with sparse gradients, variables of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(10, 4)
        self.dense = keras.layers.Dense(CLASSES, dtype="float64")

    def call(self, x: Any) -> Any:
        rows = self.table(tf.cast(x, tf.int32))
        return self.dense(tf.reduce_sum(rows, 1))


def test_a_subclassed_model_of_two_dtypes() -> None:
    x = np.arange(RECORDS * 2, dtype=np.uint8).reshape(RECORDS, 2) % 10
    y = np.arange(RECORDS) % CLASSES
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    stepper = JobStepper(make_job(TwoTypes, loss=loss, train=Arrays(x, y)))
    assert [arena.name for arena in stepper.plan.arenas] == [
        "float32.trainable",
        "float64.trainable",
    ]
    found = stepper.by_variable(stepper.run(FIRST))
    model = stepper.replica.model
    rows, labels = stepper.job.train.read(0, FIRST)
    with tf.GradientTape() as tape:
        value = loss(labels, model(rows))
    gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(
            found[variable.path], tf.convert_to_tensor(gradient), rtol=1e-5, atol=1e-6
        )


def test_a_plain_module() -> None:
    x = np.linspace(1, 3, RECORDS, dtype=np.float32)
    stepper = JobStepper(make_job(Line, loss=line_loss, train=Arrays(x, 3 * x)))
    result = stepper.run(FIRST)
    rows, y = stepper.job.train.read(0, FIRST)
    error = 2 * rows + 1 - y
    found = stepper.by_variable(result)
    assert result.loss == pytest.approx(float(np.mean(error**2)))
    assert float(found["slope"]) == pytest.approx(float(np.mean(2 * error * rows)), rel=1e-5)
    assert float(found["offset"][0]) == pytest.approx(float(np.mean(2 * error)), rel=1e-5)
    assert float(found["mean"]) == pytest.approx(0.5 * float(rows.mean()), rel=1e-5)
    # The next step starts from the parameters again, not from what the last one left behind.
    again = stepper.by_variable(stepper.run(FIRST))
    assert float(again["mean"]) == pytest.approx(float(found["mean"]))


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    def loss(_line: Line, x: Any, _y: Any) -> Any:
        return x

    x = np.ones(RECORDS, np.float32)
    with pytest.raises(InvalidJob, match=r"loss has shape \(8,\)"):
        JobStepper(make_job(Line, loss=loss, train=Arrays(x, x))).run(FIRST)


def test_a_variable_without_gradient_keeps_its_place_as_state() -> None:
    class Unused(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            self.used = keras.layers.Dense(CLASSES, activation="softmax", name="used")
            self.unused = keras.layers.Dense(2, name="unused")

        def call(self, x: Any) -> Any:
            self.unused(x)
            return self.used(x)

    replica = Replica(make_job(Unused))
    names = {v.path for v in replica.model.trainable_variables if "/unused/" in v.path}
    assert len(names) == 2
    specs = [spec for spec, _ in model_variables(replica.model, names)]
    plan = make_plan(specs, 1, "cut")
    step = FlatStep(replica.make_step(plan), plan, CPU)
    result = step(ParameterBuffers.of(plan).tensors, BatchReader(replica.job, CPU, 0)(FIRST))
    updates = whole(plan, result)
    assert np.abs(updates["float32.trainable"]).max() > 0
    assert not updates["float32.state"].any()
