"""The flat step: gradients and state as shards take them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding, round_to
from tests.worker.flat_jobs import (
    CLASSES,
    FEATURES,
    FIRST,
    RECORDS,
    JobStepper,
    Line,
    dense_model,
    make_job,
    noisy_model,
    records,
    records_of_floats,
    whole,
)
from worker import Arrays
from worker.step.flat import StepInput

pytestmark = pytest.mark.slow


def test_gradients_are_those_of_a_plain_tape_and_regularizers_count() -> None:
    stepper = JobStepper(make_job(dense_model))
    result = stepper.run(FIRST)

    model = stepper.replica.model
    x, y = stepper.job.train.read(stepper.job.seed, FIRST)
    with tf.GradientTape() as tape:
        crossentropy = keras.losses.SparseCategoricalCrossentropy()(y, model(x, training=True))
        loss = crossentropy + tf.add_n(model.losses)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])

    assert result.finite
    assert result.loss == pytest.approx(float(loss), rel=1e-6)
    assert float(loss) > float(crossentropy)
    found = stepper.by_variable(result)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(found[variable.path], gradient, rtol=1e-5, atol=1e-7)


def test_sample_weights_scale_the_loss_as_in_fit() -> None:
    weights = np.linspace(0, 2, RECORDS, dtype=np.float32)
    stepper = JobStepper(make_job(dense_model, train=records(sample_weight=weights)))
    batch = BatchId(0, 0, RECORDS)
    result = stepper.run(batch)
    model = stepper.replica.model
    model.compile(loss="sparse_categorical_crossentropy")
    x, y, w = stepper.job.train.read(stepper.job.seed, batch)
    expected = model.evaluate(x, y, sample_weight=w, batch_size=RECORDS, verbose=0)
    assert result.loss == pytest.approx(expected, rel=1e-6)


def test_state_travels_as_the_change_that_keras_makes() -> None:
    stepper = JobStepper(make_job(noisy_model))
    found = stepper.by_variable(stepper.run(FIRST))
    model = stepper.replica.model
    normalization = model.layers[1]
    x, _ = stepper.job.train.read(stepper.job.seed, FIRST)
    before = [normalization.moving_mean.numpy(), normalization.moving_variance.numpy()]
    model(x, training=True)
    after = [normalization.moving_mean.numpy(), normalization.moving_variance.numpy()]
    for variable, old, new in zip(
        (normalization.moving_mean, normalization.moving_variance), before, after, strict=True
    ):
        assert np.abs(new - old).max() > 0.01
        np.testing.assert_allclose(found[variable.path], new - old, rtol=1e-5, atol=1e-6)


def test_a_repeated_batch_gives_the_same_bits_anywhere_and_another_batch_other_masks() -> None:
    here, there = JobStepper(make_job(noisy_model)), JobStepper(make_job(noisy_model), shards=1)
    other = BatchId(1, 0, 8)
    there.run(other)
    first, again, elsewhere = here.run(FIRST), here.run(FIRST), there.run(FIRST)
    for name, update in whole(here.plan, first).items():
        assert update.tobytes() == whole(here.plan, again)[name].tobytes()
        assert update.tobytes() == whole(there.plan, elsewhere)[name].tobytes()

    # The records of the batch, under the masks of another one.
    mixed = StepInput(here.read(other).seeds, here.read(FIRST).batch)
    differing = here.step(here.parameters.tensors, mixed)
    assert differing.loss != first.loss


def test_the_parameters_are_left_alone() -> None:
    stepper = JobStepper(make_job(noisy_model))
    before = {name: array.copy() for name, array in stepper.parameters.arrays.items()}
    variables = [v.numpy() for v in stepper.replica.model.variables]
    for first in (0, 8, 16):
        stepper.run(BatchId(0, first, 8))
    for name, array in stepper.parameters.arrays.items():
        np.testing.assert_array_equal(array, before[name])
    for variable, value in zip(stepper.replica.model.variables, variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_element_is_seen(bad: float) -> None:
    stepper = JobStepper(make_job(dense_model))
    stepper.parameters.arrays["float32.trainable"][-1] = bad
    result = stepper.run(FIRST)
    assert (result.finite, result.gradients) == (False, ())


def test_large_but_finite_gradients_pass() -> None:
    # The sum of their squares is infinite in float32.
    job = make_job(dense_model, loss=lambda _y, p: 1e30 * p[:, 0])
    stepper = JobStepper(job)
    result = stepper.run(FIRST)
    assert result.finite
    assert max(np.abs(update).max() for update in stepper.by_variable(result).values()) > 1e25


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_rounded_parameters_give_the_rounded_gradient_at_them(wire: Encoding) -> None:
    rounded, plain = JobStepper(make_job(noisy_model), wire=wire), JobStepper(make_job(noisy_model))
    for name, array in rounded.parameters.arrays.items():
        plain.parameters.arrays[name][:] = array.astype(np.float32)
    found, exact = rounded.run(FIRST), plain.run(FIRST)
    assert found.finite
    assert found.loss == exact.loss
    for shard, gradient in enumerate(found.gradients):
        assert gradient["float32.trainable"].encoding == wire
        assert gradient["float32.state"].encoding == "plain"
        for name, encoded in gradient.items():
            expected = np.concatenate(exact.gradients[shard][name].parts)
            if encoded.encoding != "plain":
                expected = round_to(expected, wire)
            assert b"".join(part.tobytes() for part in encoded.parts) == expected.tobytes()


def test_values_beyond_float16_become_its_largest() -> None:
    stepper = JobStepper(make_job(dense_model, loss=lambda _y, p: 1e6 * p[:, 0]), wire="float16")
    result = stepper.run(FIRST)
    assert result.finite
    assert max(np.abs(update).max() for update in stepper.by_variable(result).values()) == 65504


@pytest.mark.parametrize(
    ("wire", "scale", "finite"),
    [
        ("plain", 1e30, True),
        ("bfloat16", 1e30, True),
        # What bfloat16 rounds up to infinity is between these two.
        ("plain", 3.4e38, True),
        ("bfloat16", 3.4e38, False),
        ("float16", 1e18, True),
        ("float16", 1e30, False),
        ("plain", np.inf, False),
        ("bfloat16", np.nan, False),
        ("float16", np.nan, False),
    ],
)
def test_only_what_is_finite_as_it_travels_counts_as_finite(
    wire: Encoding, scale: float, finite: bool
) -> None:
    x = np.ones(RECORDS, np.float32)

    def loss(line: Line, _x: Any, _y: Any) -> Any:
        return line.slope * scale + line.offset[0]

    result = JobStepper(make_job(Line, loss=loss, train=Arrays(x, x)), wire=wire).run(FIRST)
    assert result.finite == finite


def test_large_variables_and_small_ones_between_them() -> None:
    def model() -> keras.Model:
        layers = [keras.layers.Dense(512, activation="elu") for _ in range(3)]
        return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])

    stepper = JobStepper(make_job(model, loss="mse", train=records_of_floats()), shards=3)
    result = stepper.run(FIRST)
    assert max(len(gradient["float32.trainable"].parts) for gradient in result.gradients) > 1
    found = stepper.by_variable(result)
    x, y = stepper.job.train.read(stepper.job.seed, FIRST)
    trained = stepper.replica.model
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((trained(x) - y) ** 2)
    gradients = tape.gradient(loss, [v.value for v in trained.trainable_variables])
    for variable, gradient in zip(trained.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(found[variable.path], gradient, rtol=1e-4, atol=1e-6)
