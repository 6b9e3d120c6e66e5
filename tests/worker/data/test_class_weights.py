"""Weights of records, by their class or their own, and inputs by name: as ``fit`` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from tests.worker.described_jobs import described
from tests.worker.flat_jobs import CLASSES, FEATURES, RECORDS, JobStepper, dense_model, make_job
from tests.worker.model.test_compiled import TWO, two_outputs
from worker import Arrays, Job

pytestmark = pytest.mark.slow
layers = keras.layers

BATCH = BatchId(0, 0, 16)
X = np.random.default_rng(1).normal(size=(RECORDS, FEATURES)).astype(np.float32)
KINDS = np.random.default_rng(2).integers(0, CLASSES, RECORDS)
# As scikit-learn's figures come: NumPy's numbers. One class has none.
WEIGHTS = {np.int64(0): np.float32(0.5), 2: 7}


def binary_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(4), layers.Dense(1, activation="sigmoid")]
    )


def named_inputs() -> keras.Model:
    wide, deep = keras.Input((FEATURES,), name="wide"), keras.Input((2, 3), name="deep")
    both = layers.Concatenate()([layers.Dense(4)(wide), layers.Flatten()(deep)])
    return keras.Model(
        {"deep": deep, "wide": wide}, layers.Dense(CLASSES, activation="softmax")(both)
    )


def gradient_of_keras(job: Job, weights: Mapping[Any, Any] | None) -> list[np.ndarray]:
    """The values that a step of SGD with learning rate 1 subtracts in ``train_on_batch``."""
    stepper = JobStepper(job)
    model = job.model()
    model.compile(keras.optimizers.SGD(1.0), loss=job.loss)
    for own, theirs in zip(model.weights, stepper.replica.model.weights, strict=True):
        own.assign(theirs)
    before = [v.numpy().copy() for v in model.trainable_weights]
    x, y, *weight = job.train.read(job.seed, BATCH)
    model.train_on_batch(x, y, sample_weight=weight[0] if weight else None, class_weight=weights)
    return [old - v.numpy() for old, v in zip(before, model.trainable_weights, strict=True)]


CASES: dict[str, tuple[Callable[[], keras.Model], Arrays, str, Mapping[Any, Any] | None]] = {
    "classes": (dense_model, Arrays(X, KINDS), "sparse_categorical_crossentropy", WEIGHTS),
    "one-hot": (
        dense_model,
        Arrays(X, np.eye(CLASSES)[KINDS]),
        "categorical_crossentropy",
        WEIGHTS,
    ),
    "a column": (
        binary_model,
        Arrays(X, (KINDS % 2)[:, np.newaxis].astype(np.float32)),
        "binary_crossentropy",
        {1: 5.0},
    ),
    "records' own": (
        dense_model,
        Arrays(X, KINDS, np.linspace(0, 2, RECORDS)),
        "sparse_categorical_crossentropy",
        None,
    ),
    "inputs by name": (
        named_inputs,
        Arrays({"wide": X, "deep": X.reshape(-1, 2, 3)[::-1].copy()}, KINDS),
        "sparse_categorical_crossentropy",
        WEIGHTS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_fit(case: str) -> None:
    model, data, loss, weights = CASES[case]
    job = make_job(model, train=data, loss=loss, class_weight=weights)
    stepper = JobStepper(job)
    found = stepper.by_variable(stepper.run(BATCH)).values()
    expected = gradient_of_keras(job, weights)
    assert any(np.abs(gradient).max() > 0.01 for gradient in expected)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_evaluations_weigh_every_record_alike() -> None:
    plain = {
        "train": Arrays(X, KINDS),
        "eval": Arrays(X, KINDS),
        "loss": "sparse_categorical_crossentropy",
    }
    weighted = described(model=dense_model, class_weight=WEIGHTS, **plain)
    assert weighted["metrics"] == described(model=dense_model, **plain)["metrics"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"class_weight": [1, 5]}, r"class_weight is \[1, 5\] \(list\); expected a dict such as"),
        ({"class_weight": {"cat": 1.0}}, r"the class 'cat' \(str\); expected whole numbers"),
        ({"class_weight": {1: -1.0}}, r"class_weight\[1\] is -1.0 .*at least 0"),
        ({"class_weight": {1: "2"}}, r"class_weight\[1\] is '2' \(str\)"),
        (
            {"train": Arrays(X, KINDS, np.ones(RECORDS))},
            "train: class_weight is given, but the records have weights of their own",
        ),
        ({"model": two_outputs, **TWO}, "class_weight is given, but the model has several outputs"),
        (
            {"train": Arrays(X, X.reshape(-1, 2, 3)), "loss": "mse"},
            r"labels are float32 of shape \[10, 2",
        ),
    ],
)
def test_records_without_a_class_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidJob, match=says):
        described(**{"model": dense_model, "metrics": [], "class_weight": {0: 2.0}, **fields})
