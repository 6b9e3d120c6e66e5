"""Several steps of a worker by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidArgument, InvalidJob
from tests.worker.flat_jobs import (
    CPU,
    RECORDS,
    JobStepper,
    dense_model,
    make_job,
    noisy_model,
    whole,
)
from worker.data.source import Array
from worker.step.arenas import StepResult
from worker.step.layout import Compressor
from worker.step.local_sgd import LocalSgd
from worker.step.local_steps import LocalReader, LocalSteps, sub_batches

pytestmark = pytest.mark.slow

WHOLE = BatchId(0, 0, RECORDS)
TRAINABLE, STATE = "float32.trainable", "float32.state"


def sgd(rate: Any = 0.1, **arguments: Any) -> LocalSgd:
    return LocalSgd.of(keras.optimizers.serialize(keras.optimizers.SGD(rate, **arguments)))


class Local(JobStepper):
    """The local steps of a job, on batches of 8 records."""

    def __init__(
        self,
        model: Callable[[], Any],
        optimizer: LocalSgd,
        wire: Encoding = "plain",
        compression: Any = None,
    ) -> None:
        super().__init__(make_job(model), wire=wire)
        compressor = Compressor(self.plan, compression, 0.5) if compression else None
        step = self.replica.make_step(self.plan)
        self.local = LocalSteps(step, self.plan, CPU, optimizer, 3, wire, compressor)
        self.local_read = LocalReader(self.read, 8)

    def steps(self, batch: BatchId = WHOLE, version: int = 0) -> StepResult:
        return self.local(self.parameters.tensors, self.local_read(batch), version)

    def pushed(self, batch: BatchId = WHOLE, version: int = 0) -> dict[str, Array]:
        return whole(self.plan, self.steps(batch, version))

    def by_hand(
        self, rates: list[float], momentum: float = 0.0, nesterov: bool = False
    ) -> tuple[dict[str, Array], float]:
        """The same with one step at a time and NumPy, in float64; and the loss."""
        first = {name: a.astype(np.float64) for name, a in self.parameters.arrays.items()}
        velocity = np.zeros_like(first[TRAINABLE])
        losses = []
        for piece, rate in zip(sub_batches(WHOLE, 8), rates, strict=True):
            result = self.run(piece)
            found = whole(self.plan, result)
            change = -rate * found[TRAINABLE].astype(np.float64)
            velocity = momentum * velocity + change
            moved = momentum * velocity + change if nesterov else velocity
            self.parameters.arrays[TRAINABLE][:] += moved.astype(np.float32)
            if STATE in found:
                self.parameters.arrays[STATE][:] += found[STATE]
            losses.append(result.loss)
        last = {name: a.astype(np.float64) for name, a in self.parameters.arrays.items()}
        for name, values in first.items():
            self.parameters.arrays[name][:] = values
        signs = {TRAINABLE: -1, STATE: 1}
        return {name: signs[name] * (last[name] - first[name]) for name in last}, float(
            np.mean(losses)
        )


def test_a_batch_is_cut_into_pieces() -> None:
    assert sub_batches(BatchId(2, 16, 8), 8) == [BatchId(2, 16, 8)]
    pieces = [BatchId(2, 16, 8), BatchId(2, 24, 8), BatchId(2, 32, 1)]
    assert sub_batches(BatchId(2, 16, 17), 8) == pieces


@pytest.mark.parametrize("model", [dense_model, noisy_model])
def test_one_step_is_that_of_the_shards(model: Callable[[], Any]) -> None:
    local = Local(model, sgd(0.1))
    one = BatchId(0, 8, 8)
    gradient = whole(local.plan, local.run(one))
    pushed = local.pushed(one)
    np.testing.assert_allclose(pushed[TRAINABLE], 0.1 * gradient[TRAINABLE], atol=1e-7)
    if STATE in pushed:
        np.testing.assert_array_equal(pushed[STATE], gradient[STATE])
    assert local.steps(one).loss == pytest.approx(local.run(one).loss)


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)], ids=["", "m", "nesterov"]
)
def test_steps_go_on_from_one_another(momentum: float, nesterov: bool) -> None:
    # Dropout and BatchNormalization: the pieces have masks and statistics of their own.
    local = Local(noisy_model, sgd(0.1, momentum=momentum, nesterov=nesterov))
    expected, loss = local.by_hand([0.1] * 3, momentum, nesterov)
    for _ in range(2):
        # Velocities begin anew with each batch.
        pushed = local.pushed()
        for name, values in expected.items():
            np.testing.assert_allclose(pushed[name], values, rtol=1e-4, atol=1e-6)
    assert local.steps().loss == pytest.approx(loss)


def test_the_schedule_counts_local_steps() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([6, 7], [0.1, 0.2, 0.05])
    local = Local(dense_model, sgd(schedule))
    # Version 2 begins with step 6, of 3 local steps each.
    expected, _ = local.by_hand([0.1, 0.2, 0.05])
    np.testing.assert_allclose(local.pushed(version=2)[TRAINABLE], expected[TRAINABLE], atol=1e-6)
    expected, _ = local.by_hand([0.05] * 3)
    np.testing.assert_allclose(local.pushed(version=3)[TRAINABLE], expected[TRAINABLE], atol=1e-6)


def test_an_attempt_gives_the_same_bits_in_another_worker() -> None:
    one, other = (Local(noisy_model, sgd(0.1, momentum=0.9)) for _ in range(2))
    other.pushed(BatchId(0, 0, 8))
    other.pushed(BatchId(0, 0, 16), version=7)
    for name, values in one.pushed(version=1).items():
        np.testing.assert_array_equal(values, other.pushed(version=1)[name])


def test_variables_are_joined_a_few_at_a_time_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TensorFlow's time to compile one operation grows with the square of its inputs."""
    expected = Local(noisy_model, sgd(0.1, momentum=0.9)).pushed()
    monkeypatch.setattr("worker.step.local_steps.MOST_JOINED", 2)
    local = Local(noisy_model, sgd(0.1, momentum=0.9))
    for name, values in local.pushed().items():
        np.testing.assert_array_equal(values, expected[name])
    (trace,) = local.local._traces.values()
    joins = [node for node in trace._concrete.graph.as_graph_def().node if node.op == "ConcatV2"]
    # Six trainable variables in three pairs, which one more operation joins; the axis is an input.
    assert sorted(len(node.input) - 1 for node in joins)[-4:] == [2, 2, 2, 3]


def test_a_step_leaves_what_was_received_alone() -> None:
    local = Local(noisy_model, sgd(0.1, momentum=0.9))
    before = {name: array.copy() for name, array in local.parameters.arrays.items()}
    local.pushed()
    for name, array in local.parameters.arrays.items():
        np.testing.assert_array_equal(array, before[name])


def test_the_loss_is_a_mean_over_records_and_a_short_piece_counts_less() -> None:
    local = Local(dense_model, sgd(0.0))
    assert not np.any(local.pushed()[TRAINABLE])
    batch = BatchId(0, 0, 10)
    ten, two = local.run(BatchId(0, 0, 8)).loss, local.run(BatchId(0, 8, 2)).loss
    assert local.steps(batch).loss == pytest.approx((8 * ten + 2 * two) / 10)


def test_gradients_that_are_not_finite_are_skipped() -> None:
    local = Local(dense_model, sgd(1e30))
    result = local.steps()
    assert (result.finite, result.gradients) == (False, ())


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_a_difference_travels_rounded(wire: Encoding) -> None:
    local = Local(noisy_model, sgd(0.1, momentum=0.9), wire=wire)
    (gradient, _) = local.steps().gradients
    assert gradient[TRAINABLE].encoding == wire
    assert gradient[STATE].encoding == "plain"
    plain = Local(noisy_model, sgd(0.1, momentum=0.9))
    for name, array in plain.parameters.arrays.items():
        array[:] = local.parameters.arrays[name].astype(array.dtype)
    found, expected = local.pushed(), plain.pushed()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-2, atol=1e-3)


def test_a_difference_travels_compressed_with_what_was_left_out_of_the_last() -> None:
    local = Local(dense_model, sgd(0.1), compression="topk")
    first = local.steps()
    assert [gradient[TRAINABLE].encoding for gradient in first.gradients] == ["topk"] * 2
    sent = [gradient[TRAINABLE].parts[0].tobytes() for gradient in first.gradients]
    again = [gradient[TRAINABLE].parts[0].tobytes() for gradient in local.steps().gradients]
    assert sent != again


@pytest.mark.parametrize("compression", ["topk", "int8"])
def test_a_difference_is_compressed_as_it_is_where_parameters_travel_rounded(
    compression: str,
) -> None:
    rounded = Local(dense_model, sgd(0.1), wire="bfloat16", compression=compression)
    plain = Local(dense_model, sgd(0.1), compression=compression)
    for name, array in plain.parameters.arrays.items():
        array[:] = rounded.parameters.arrays[name].astype(array.dtype)
    for found, expected in zip(rounded.steps().gradients, plain.steps().gradients, strict=True):
        assert found[TRAINABLE].encoding == compression
        assert found[TRAINABLE].parts[0].tobytes() == expected[TRAINABLE].parts[0].tobytes()


def test_a_device_that_is_not_there_is_refused() -> None:
    class Elsewhere(keras.layers.Dense):  # type: ignore[misc]
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            with tf.device("/GPU:7"):
                return super().call(inputs)

    local = Local(lambda: keras.Sequential([keras.Input((6,)), Elsewhere(3, "softmax")]), sgd(0.1))
    with pytest.raises(InvalidArgument, match=r"on /GPU:7, and this worker has /CPU:0"):
        local.steps()


def test_a_module_takes_local_steps() -> None:
    class Linear(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(tf.zeros([6]))

    def loss(module: Linear, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((tf.linalg.matvec(x, module.w) - tf.cast(y, tf.float32)) ** 2)

    job = make_job(Linear, loss=loss)
    stepper = JobStepper(job)
    local = LocalSteps(stepper.replica.make_step(stepper.plan), stepper.plan, CPU, sgd(0.1), 3)
    pushed = whole(
        stepper.plan, local(stepper.parameters.tensors, LocalReader(stepper.read, 8)(WHOLE), 0)
    )
    w = np.zeros(6)
    for piece in sub_batches(WHOLE, 8):
        x, y = job.train.read(0, piece)
        w -= 0.1 * 2 * (x @ w - y) @ x / 8
    np.testing.assert_allclose(pushed[TRAINABLE], -w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (keras.optimizers.Adam(), "local_steps needs SGD, with momentum or without, but optimizer"),
        (keras.optimizers.SGD(weight_decay=0.1), r"cannot be used with SGD\(weight_decay=0.1\)"),
        (keras.optimizers.SGD(clipnorm=1.0), r"SGD\(clipnorm=1.0\)"),
        (keras.optimizers.SGD(use_ema=True), r"SGD\(use_ema=True\)"),
    ],
)
def test_other_optimizers_are_refused(optimizer: Any, says: str) -> None:
    with pytest.raises(InvalidJob, match=says):
        LocalSgd.of(keras.optimizers.serialize(optimizer))
