"""State of layers beside their weights: metrics; and assignments that would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from tests.worker.described_jobs import classes, described
from tests.worker.flat_jobs import CLASSES, FEATURES, FIRST, JobStepper, make_job
from tests.worker.step.test_evaluator import RECORDS, eval_data, make_evaluator, summed
from worker import Arrays

pytestmark = pytest.mark.slow
layers = keras.layers


class Watched(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Counts the mean magnitude of what passes, as Keras's own guide does."""

    def __init__(self, name: str = "watched", metric: str = "magnitude") -> None:
        super().__init__(name=name)
        self.magnitude = keras.metrics.Mean(name=metric)

    def call(self, x: Any) -> Any:
        # A number for each record, so that a smaller last batch weighs less.
        self.magnitude.update_state(keras.ops.mean(keras.ops.abs(x), -1))
        return x


def watched_model(metric: str = "magnitude") -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(4),
            Watched(metric=metric),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def test_metrics_of_layers_are_evaluated_beside_those_of_the_job() -> None:
    job = make_job(watched_model, metrics=["accuracy"], eval=eval_data())
    one, parameters, model = make_evaluator(job)
    other, others, _ = make_evaluator(job)
    tasks = [one.states(parameters, 0, 20), other.states(others, 20, RECORDS)]
    merger, _, _ = make_evaluator(job)
    results = dict(merger.merge(summed(tasks)).results)
    model.compile(loss=job.loss, metrics=["accuracy"])
    assert job.eval is not None
    x, y = job.eval.read_range(0, RECORDS)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    assert set(results) == set(expected) == {"loss", "accuracy", "magnitude"}
    for name, value in expected.items():
        assert results[name] == pytest.approx(value, rel=1e-5), name


def test_a_step_with_a_metric_in_a_layer_is_the_step_without() -> None:
    stepper = JobStepper(make_job(watched_model))
    assert not [v.name for v in stepper.plan.variables if "magnitude" in v.name]
    assert stepper.run(FIRST).loss == stepper.run(FIRST).loss


def watched_classes(metric: str = "magnitude") -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Watched(metric=metric), layers.Dense(3)])


def test_the_description_names_them() -> None:
    document = described(model=watched_classes, eval=classes(), keep_best="min:magnitude")
    assert document["metrics"] == ["loss", "magnitude", "accuracy"]
    assert document["keep_best"] == {"metric": "magnitude", "lower": True}


def test_two_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidJob, match="two metrics are named 'accuracy'"):
        described(model=lambda: watched_classes("accuracy"), eval=classes())


def test_a_metric_named_like_another_is_said_to_be_the_models() -> None:
    why = "two metrics are named 'loss': the model or one of its layers keeps .* remove it"
    with pytest.raises(InvalidJob, match=why):
        described(model=lambda: watched_classes("loss"), eval=classes())


def normalized() -> keras.Model:
    dense = layers.Dense(3, name="dense")
    return keras.Sequential([keras.Input((4,)), layers.SpectralNormalization(dense, name="sn")])


class Elsewhere(keras.layers.Layer):  # type: ignore[misc]
    """Draws from Keras's global generator."""

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x))


OUTSIDE = keras.Variable(0.0, name="outside")


class Outside(keras.layers.Layer):  # type: ignore[misc]
    """Keeps count where the model does not know of it."""

    def call(self, x: Any) -> Any:
        OUTSIDE.assign(OUTSIDE + 1.0)
        return x


class OfTensorFlow(keras.layers.Layer):  # type: ignore[misc]
    """Keeps count in a variable that Keras does not track, and reads another one."""

    def __init__(self, assign: Callable[[tf.Variable], Any]) -> None:
        super().__init__()
        self.seen = tf.Variable(0.0, name="seen")
        self.scale = tf.Variable(1.0, name="scale")
        self.assign = assign

    def call(self, x: Any) -> Any:
        self.assign(self.seen)
        return x * self.scale


class Noisy(keras.layers.Layer):  # type: ignore[misc]
    """Draws from TensorFlow's own generator, which no batch sets."""

    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))


def count(seen: tf.Variable) -> None:
    seen.assign_add(1.0)


def count_sometimes(seen: tf.Variable) -> None:
    tf.cond(seen < 9.0, lambda: seen.assign_add(1.0), seen.read_value)


def look(seen: tf.Variable) -> None:
    tf.cond(seen < 9.0, lambda: seen + 1.0, seen.read_value)


class Scaled(keras.layers.Layer):  # type: ignore[misc]
    """Multiplies by a weight, in a way that is told."""

    def __init__(self, multiply: Callable[[Any, Any], Any]) -> None:
        super().__init__(name="scaled")
        self.multiply = multiply

    def build(self, _shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return self.multiply(x, self.scale)


class ByItself(Scaled):
    """The same, compiled by itself."""

    call = tf.function(Scaled.call)


def multiplied(x: Any, scale: Any) -> Any:
    return x * scale


def in_a_loop(x: Any, scale: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y * scale), (0, x))[1]


def by_remat(x: Any, scale: Any) -> Any:
    return keras.remat(lambda y: y * scale)(x)


def by_argument(x: Any, scale: Any) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def multiply(x: Any, value: Any) -> Any:
        return x * value, lambda up: (up * scale.value, tf.reduce_sum(up * x))

    return multiply(x, scale.value)


class Whole(keras.Model):  # type: ignore[misc]
    """Is compiled by itself when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    @tf.function  # type: ignore[untyped-decorator]
    def call(self, x: Any) -> Any:
        return self.dense(x)


def stateful() -> keras.Model:
    inputs = keras.Input((4, 1), batch_size=10)
    rnn = layers.SimpleRNN(2, stateful=True, name="rnn")
    return keras.Sequential([inputs, rnn, layers.Dense(3)])


def with_layer(make: Callable[[], Any]) -> Callable[[], keras.Model]:
    return lambda: keras.Sequential([keras.Input((4,)), make(), layers.Dense(3)])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (normalized, "assigns the trainable variable 'sequential/sn/dense/kernel', which the opt"),
        (with_layer(Elsewhere), "which is not the model's.*keras.random.SeedGenerator"),
        (stateful, "layer 'rnn' is made with stateful=True"),
        (with_layer(Outside), "assigns variable 'outside', which is not the model's"),
        (with_layer(lambda: ByItself(multiplied)), "'sequential/scaled/scale' within"),
        (Whole, "'whole/dense/kernel' within a tf.function of its own"),
        (
            with_layer(lambda: Scaled(by_remat)),
            "'sequential/scaled/scale' within a custom gradient",
        ),
        (with_layer(lambda: OfTensorFlow(count)), "assigns variable 'seen:0', a tf.Variable that"),
        (with_layer(lambda: OfTensorFlow(tf.function(count))), "assigns variable 'seen:0'"),
        (with_layer(lambda: OfTensorFlow(count_sometimes)), "assigns variable 'seen:0'"),
        (with_layer(Noisy), r"draws random numbers by itself \(RandomStandardNormal"),
    ],
)
def test_state_that_would_be_lost_is_refused(model: Callable[[], keras.Model], says: str) -> None:
    data = classes()
    if model is stateful:
        data = Arrays(np.ones((60, 4, 1), np.float32), np.arange(60) % 3)
    with pytest.raises(InvalidJob, match=says) as raised:
        described(model=model, train=data)
    assert raised.value.code == "PS108"


def test_variables_only_read_are_no_state() -> None:
    assert described(model=with_layer(lambda: OfTensorFlow(look)), train=classes())["variables"]


@pytest.mark.parametrize("multiply", [multiplied, in_a_loop, by_argument, tf.stop_gradient])
def test_models_that_read_variables_in_other_ways_are_described(
    multiply: Callable[..., Any],
) -> None:
    model = with_layer(lambda: Scaled(lambda x, scale: keras.activations.silu(multiply(x, scale))))
    if multiply is tf.stop_gradient:
        model = with_layer(lambda: Scaled(lambda x, y: keras.activations.silu(x + multiply(y))))
    roles = {v["name"]: v["role"] for v in described(model=model, train=classes())["variables"]}
    without = multiply is tf.stop_gradient
    assert roles["sequential/scaled/scale"] == ("state" if without else "trainable")


def test_a_custom_gradient_reads_the_values_of_the_step() -> None:
    def build() -> keras.Model:
        dense = layers.Dense(CLASSES, name="first")
        scaled = Scaled(by_argument)
        return keras.Sequential([keras.Input((FEATURES,)), dense, scaled, layers.Softmax()])

    stepper = JobStepper(make_job(build))
    for values in stepper.parameters.arrays.values():
        values *= 3
    found = stepper.by_variable(stepper.run(FIRST))
    model = build()
    for variable, own in zip(model.weights, stepper.replica.model.weights, strict=True):
        variable.assign(3 * own)
    x, y = stepper.job.train.read(stepper.job.seed, FIRST)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x)))
    expected = tape.gradient(loss, [v.value for v in model.trainable_weights])
    for got, wanted in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
