"""Models that compute in float16: their gradients neither vanish nor overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from tests.worker.flat_jobs import (
    CLASSES,
    CPU,
    FEATURES,
    FIRST,
    RECORDS,
    JobStepper,
    make_job,
    records_of_floats,
    whole,
)
from worker.model import loss_scale
from worker.model.build import serialized_optimizer
from worker.model.compiled import complete
from worker.step.flat import FlatStep
from worker.step.keras_step import KerasStep
from worker.step.local_sgd import LocalSgd
from worker.step.local_steps import LocalReader, LocalSteps

pytestmark = pytest.mark.slow
layers = keras.layers


def model(dtype: str, dropped: float = 0.0) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(16, activation="elu", dtype=dtype),
                layers.BatchNormalization(dtype=dtype),
                layers.Dropout(dropped, dtype=dtype),
                layers.Dense(CLASSES, dtype=dtype),
            ]
        )

    return build


def stepper_of(dtype: str, factor: float = 1.0, **fields: Any) -> JobStepper:
    def loss(y: Any, p: Any) -> Any:
        return factor * tf.reduce_mean(tf.square(y - tf.cast(p, tf.float32)), -1)

    fields = {"train": records_of_floats(), "loss": loss, "metrics": ["mse"], **fields}
    return JobStepper(make_job(**{"model": model(dtype), **fields}))


def gradients(found: JobStepper) -> np.ndarray:
    """Of all trainable variables, one after the other."""
    result = found.run(FIRST)
    assert result.finite
    trained = [spec.name for spec in found.plan.variables if spec.role == "trainable"]
    by_variable = found.by_variable(result)
    return np.concatenate([by_variable[name].ravel() for name in trained])


@pytest.mark.parametrize("factor", [1e-9, 1e-6, 1.0, 1e2, 1e4])
def test_gradients_are_those_of_float32(factor: float) -> None:
    half, whole = (
        gradients(stepper_of("mixed_float16", factor)),
        gradients(stepper_of("float32", factor)),
    )
    assert np.abs(whole).max() > 0.01 * factor
    np.testing.assert_allclose(half / factor, whole / factor, rtol=0.05, atol=0.02)


def test_without_a_scale_small_gradients_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.step.replica.loss_scale", lambda *_: None)
    kernel = next(iter((b := stepper_of("mixed_float16", 1e-9)).by_variable(b.run(FIRST)).values()))
    assert not kernel.any()


def scales_tried(monkeypatch: pytest.MonkeyPatch, factor: float) -> tuple[list[float], bool]:
    """The scales of the attempts of a batch, and whether what came of it is finite."""
    tried: list[float] = []
    attempt = KerasStep._attempt

    def counting(self: Any, values: Any, seeds: Any, batch: Any, tables: Any, scale: Any) -> Any:
        tell = tf.py_function(lambda at: tried.append(float(at)), [scale], [])
        with tf.control_dependencies([tell]):
            return attempt(self, values, seeds, batch, tables, tf.identity(scale))

    monkeypatch.setattr(KerasStep, "_attempt", counting)
    finite = stepper_of("mixed_float16", factor).run(FIRST).finite
    return tried, finite


def test_a_gradient_that_overflows_is_computed_again_with_a_smaller_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert scales_tried(monkeypatch, 1.0) == ([2.0**15], True)
    monkeypatch.undo()
    assert scales_tried(monkeypatch, 4.0) == ([2.0**15, 2.0**11], True)
    monkeypatch.undo()
    tried, finite = scales_tried(monkeypatch, 1e9)
    assert tried == [2.0 ** (15 - 4 * i) for i in range(loss_scale.ATTEMPTS)]
    assert not finite


def test_a_loss_that_is_not_finite_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scales_tried(monkeypatch, float("inf")) == ([2.0**15], False)


def test_a_batchs_gradient_does_not_depend_on_earlier_batches() -> None:
    noisy = {"model": model("mixed_float16", 0.25)}
    one, other = (stepper_of("mixed_float16", 1e3, **noisy) for _ in range(2))
    expected = gradients(one)
    other.run(FIRST)
    np.testing.assert_array_equal(gradients(other), expected)


def test_local_steps_are_scaled() -> None:
    found = {}
    for dtype in ("mixed_float16", "float32"):
        made = stepper_of(dtype, 1e-9)
        sgd = LocalSgd.of(keras.optimizers.serialize(keras.optimizers.SGD(1e6)))
        step = made.replica.make_step(made.plan)
        local = LocalSteps(step, made.plan, CPU, sgd, 3)
        read = LocalReader(made.read, 8)
        result = local(made.parameters.tensors, read(BatchId(0, 0, RECORDS)), 0)
        found[dtype] = whole(made.plan, result)["float32.trainable"]
    assert np.abs(found["float32"]).max() > 1e-4
    np.testing.assert_allclose(found["mixed_float16"], found["float32"], rtol=0.05, atol=5e-5)


def test_metrics_are_those_of_the_attempt_that_counts() -> None:
    made = stepper_of("mixed_float16", 1e3)
    made.step = FlatStep(made.replica.make_step(made.plan, counts=True), made.plan, CPU)
    result = made.run(FIRST)
    total, count = result.metrics
    assert count == FIRST.count
    # The loss is a thousand times this metric.
    assert total / count == pytest.approx(result.loss / 1e3, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_other_models_have_no_scale(dtype: str) -> None:
    found = stepper_of(dtype)
    step = found.replica.make_step(found.plan)
    assert isinstance(step, KerasStep)
    assert step._scale is None


def compiled(optimizer: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        with_policy = keras.dtype_policies.get("mixed_float16")
        built = model("mixed_float16")()
        built.dtype_policy = with_policy
        built.compile(optimizer, loss="mse")
        return built

    return build


def test_the_optimizer_of_compile_is_the_one_inside_that_which_scales() -> None:
    build = compiled(keras.optimizers.Adam(0.25))
    assert isinstance(build().optimizer, keras.optimizers.LossScaleOptimizer)
    for given in (None, keras.optimizers.Adam(0.25)):
        job = make_job(build, train=records_of_floats(), loss=None, optimizer=given)
        job, _ = complete(job, job.train.read_range(0, 2))
        serialized = serialized_optimizer(job, {}, [])
        assert serialized["class_name"] == "Adam"
        assert serialized["config"]["learning_rate"] == 0.25


def test_a_scale_that_the_optimizer_gives_is_taken() -> None:
    given = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**6)
    found = stepper_of("mixed_float16", optimizer=given)
    step = found.replica.make_step(found.plan)
    assert isinstance(step, KerasStep)
    assert step._scale == 2.0**6
    assert serialized_optimizer(found.job, {}, [])["class_name"] == "SGD"


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), dynamic_growth_steps=9),
            "dynamic_growth_steps=9, but every batch begins with initial_scale",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0),
            r"initial_scale=2\.0; give the optimizer itself",
        ),
    ],
)
def test_unsupported_loss_scaling_is_refused(optimizer: Any, says: str) -> None:
    job = make_job(model("mixed_float16"), train=records_of_floats(), optimizer=optimizer)
    with pytest.raises(InvalidJob, match=says):
        serialized_optimizer(job, {}, [])
