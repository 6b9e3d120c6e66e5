"""Which metrics add up over batches: all of Keras's, and not a maximum."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest

from tests.worker.described_jobs import classes, dense, described
from worker import Arrays
from worker.model.metrics import is_kerass_own, not_summable, summable_results

X = np.arange(1, 61, dtype=np.float32)[:, None].repeat(4, axis=1)
Y = np.zeros((60, 1), np.float32)


class Largest(keras.metrics.Metric):  # type: ignore[misc]
    """The greatest error so far."""

    def __init__(self, name: str = "largest", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.most.assign(keras.ops.maximum(self.most, error))

    def result(self) -> Any:
        return self.most


ARGUMENTS: dict[str, dict[str, Any]] = {
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "MeanIoU": {"num_classes": 2},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "BinaryIoU": {},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
OF_VALUES = ("Mean", "Sum")
OF_CLASSES = ("IoU", "MeanIoU")
KERAS = sorted(
    name
    for name, made in vars(keras.metrics).items()
    if inspect.isclass(made) and issubclass(made, keras.metrics.Metric) and name != "Metric"
)


@pytest.mark.parametrize("name", KERAS)
def test_keras_metrics_add_up(name: str) -> None:
    metric = getattr(keras.metrics, name)(**ARGUMENTS.get(name, {}))
    rng = np.random.default_rng(1)
    batches = []
    for size in (5, 3):
        y_pred = rng.dirichlet(np.ones(3), size).astype(np.float32)
        y_true = np.eye(3, dtype=np.float32)[rng.integers(0, 3, size)]
        if "Sparse" in name:
            y_true = np.argmax(y_true, axis=-1)
        if name in OF_CLASSES:
            y_true, y_pred = (np.argmax(each, axis=-1) % 2 for each in (y_true, y_pred))
        batches.append((y_pred,) if name in OF_VALUES else (y_true, y_pred))
    metric.update_state(*batches[0])
    updates = [lambda batch=batch: metric.update_state(*batch) for batch in batches]
    assert not_summable([metric], updates) == []
    assert is_kerass_own(metric)
    assert len(KERAS) > 40


def test_a_maximum_does_not_and_keeps_its_state() -> None:
    metric, mean = Largest(), keras.metrics.Mean()
    metric.update_state(np.zeros(2), np.array([7.0, 1.0]))

    def count(value: float) -> None:
        metric.update_state(np.zeros(2), np.array([value, 1.0]))
        mean.update_state(value)

    found = not_summable([metric, mean], [lambda: count(3.0), lambda: count(2.0)])
    assert found == [metric]
    assert not is_kerass_own(metric)
    assert float(metric.result()) == 7.0


def test_results_go_by_the_output_or_by_themselves() -> None:
    assert summable_results(Largest("m"), ["m", "a_m", "am", "n"]) == ["m", "a_m"]


@pytest.mark.slow
def test_a_description_names_the_metrics_that_do_not_add_up() -> None:
    fields = {"model": lambda: dense(1), "loss": "mse", "train": Arrays(X, Y)}
    assert described(**fields, metrics=["mae", Largest])["unsummed_metrics"] == ["largest"]
    # Of a batch of one record, too.
    found = described(**fields, metrics=[Largest, "mae"], batch_size=1)
    assert found["unsummed_metrics"] == ["largest"]
    assert described(train=classes())["unsummed_metrics"] == []


@pytest.mark.slow
def test_those_of_several_outputs_go_by_their_outputs() -> None:
    def model() -> keras.Model:
        given = keras.Input((4,))
        one, two = (keras.layers.Dense(1, name=name)(given) for name in ("one", "two"))
        return keras.Model(given, {"one": one, "two": two})

    found = described(
        model=model,
        loss={"one": "mse", "two": "mse"},
        metrics={"one": ["mae"], "two": [Largest()]},
        train=Arrays(X, {"one": Y, "two": Y}),
    )
    assert found["unsummed_metrics"] == ["two_largest"]
