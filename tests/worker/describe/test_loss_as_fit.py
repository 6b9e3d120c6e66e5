"""The loss of a job and its gradient are those of ``compile`` and ``fit``, whatever form it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from tests.worker.flat_jobs import FEATURES, RECORDS, JobStepper, make_job
from tests.worker.step.test_evaluator import make_evaluator, summed
from worker import Arrays

pytestmark = pytest.mark.slow
layers = keras.layers

BATCH = BatchId(0, 0, 8)


def own(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - p), axis=-1)


class Squared(keras.losses.Loss):  # type: ignore[misc]
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return own(y_true, y_pred)


def column(*, wide: bool = False) -> keras.Model:
    regularizer = keras.regularizers.L2(0.1)
    x = keras.Input((FEATURES,))
    out = layers.Dense(1, activation="sigmoid", kernel_regularizer=regularizer, name="out")(x)
    if not wide:
        return keras.Model(x, out)
    return keras.Model(x, {"out": out, "two": layers.Dense(1, name="two")(x)})


def in_a_dict() -> keras.Model:
    x = keras.Input((FEATURES,))
    return keras.Model(x, {"out": layers.Dense(1, name="out")(x)})


class Two(keras.Model):  # type: ignore[misc]
    """Says its outputs only when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [layers.Dense(1), layers.Dense(1)]

    def call(self, x: Any) -> Any:
        return {"out": self.heads[0](x), "two": self.heads[1](x)}


def masked() -> keras.Model:
    ids = keras.Input((5,), dtype="int64")
    steps = layers.Embedding(9, 3, mask_zero=True)(ids)
    return keras.Model(ids, layers.Dense(1, activation="sigmoid")(steps))


class Squares(keras.layers.Layer):  # type: ignore[misc]
    """Adds a loss of its own for each record."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.square(x[:, 0]))
        return x


def with_losses_by_record() -> keras.Model:
    x = keras.Input((FEATURES,))
    return keras.Model(x, layers.Dense(1)(Squares()(x)))


GENERATOR = np.random.default_rng(4)
X = GENERATOR.normal(size=(RECORDS, FEATURES)).astype(np.float32)
FLAT = (X[:, 0] > 0).astype(np.float32)
WEIGHTS = GENERATOR.uniform(0.5, 2, RECORDS).astype(np.float32)
STEPS = np.arange(RECORDS * 5).reshape(RECORDS, 5) % 9
ODD = (STEPS % 2).astype(np.float32)[..., None]
BOTH = {"out": FLAT, "two": X[:, 1]}

ONE: list[Any] = ["hinge", "binary_crossentropy", "crossentropy", "mse", own, Squared()]
ONE += [lambda y, p: own(y, p), keras.losses.Hinge(), keras.losses.BinaryCrossentropy()]
ONE += [keras.losses.Hinge(reduction="sum"), keras.losses.hinge]

CASES: list[tuple[Callable[[], keras.Model], Arrays, dict[str, Any]]] = [
    *((column, Arrays(X, FLAT), {"loss": loss}) for loss in ONE),
    *((column, Arrays(X, FLAT, WEIGHTS), {"loss": loss}) for loss in ONE[:6]),
    *((column, Arrays(X, FLAT), {"loss": loss, "class_weight": {1: 3.0}}) for loss in ONE[:6]),
    (column, Arrays(X, FLAT[:, None]), {"loss": "hinge"}),
    (column, Arrays(X, FLAT), {"loss": {"out": "hinge"}}),
    (with_losses_by_record, Arrays(X, FLAT), {"loss": own}),
    (masked, Arrays(STEPS, ODD), {"loss": own}),
    (masked, Arrays(STEPS, ODD), {"loss": "hinge"}),
    (masked, Arrays(STEPS, ODD, (1.0 + STEPS).astype(np.float32)), {"loss": "hinge"}),
    (in_a_dict, Arrays(X, {"out": FLAT}), {"loss": own}),
    (in_a_dict, Arrays(X, {"out": FLAT}), {"loss": "hinge"}),
    *((lambda: column(wide=True), Arrays(X, BOTH), {"loss": loss}) for loss in (own, "hinge")),
    (lambda: column(wide=True), Arrays(X, BOTH), {"loss": {"out": "hinge", "two": own}}),
    (lambda: column(wide=True), Arrays(X, BOTH, WEIGHTS), {"loss": own}),
    *((Two, Arrays(X, BOTH), {"loss": loss}) for loss in (own, "hinge")),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_value_and_gradient_are_those_of_keras(case: int) -> None:
    model, data, fields = CASES[case]
    stepper = JobStepper(make_job(model, train=data, eval=data, **fields))
    result = stepper.run(BATCH)
    found = stepper.by_variable(result)

    plain = model()
    plain.compile("sgd", fields["loss"])
    x, y, weights = (*stepper.job.train.read(stepper.job.seed, BATCH), None)[:3]
    if "class_weight" in fields:
        weights = np.where(y == 1, 3.0, 1.0).astype(np.float32)
    plain(x)
    for mine, theirs in zip(plain.weights, stepper.replica.model.weights, strict=True):
        mine.assign(theirs)
    with tf.GradientTape() as tape:
        loss = plain.compute_loss(x, y, plain(x, training=True), weights)
    gradients = tape.gradient(loss, [v.value for v in plain.trainable_weights])
    assert result.loss == pytest.approx(float(loss), rel=1e-5)
    assert len(found) == len(gradients)
    for got, wanted in zip(found.values(), gradients, strict=True):
        np.testing.assert_allclose(got, tf.convert_to_tensor(wanted), rtol=1e-4, atol=1e-6)


METRICS: list[Any] = ["accuracy", "auc", "mse", "hinge", keras.metrics.AUC(name="area"), own]
METRICS += [keras.metrics.BinaryAccuracy(name="right"), keras.metrics.MeanSquaredError()]


@pytest.mark.parametrize("nested", [False, True], ids=["", "in a list"])
@pytest.mark.parametrize("labels", [FLAT, FLAT[:, None]], ids=["[n]", "[n, 1]"])
def test_evaluations_have_the_loss_and_metrics_of_keras(labels: Any, nested: bool) -> None:
    data = Arrays(X, labels)
    metrics: Any = [METRICS] if nested else METRICS
    job = make_job(column, train=data, eval=data, loss=own, metrics=metrics)
    evaluator, parameters, model = make_evaluator(job)
    states = evaluator.states(parameters, 0, RECORDS)
    results = dict(evaluator.merge(summed([states])).results)
    model.compile("sgd", own, metrics=METRICS)
    expected = model.evaluate(X, labels, batch_size=RECORDS, verbose=0, return_dict=True)
    assert results == pytest.approx(expected, rel=1e-5)
