from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from pserver.workspace import Workspace
from psrpc.batch import BatchId
from psrpc.encoding import Encoding, round_to, wire_dtype
from psrpc.errors import InvalidJob
from psrpc.plan import Plan, make_plan
from worker import Arrays, Job
from worker.buffers import ParameterBuffers
from worker.compression import Compressor
from worker.compute import BatchReader
from worker.data import Array
from worker.devices import HOST, Device
from worker.flat import FlatStep, StepInput, StepResult
from worker.replica import Replica
from worker.variables import model_variables

pytestmark = pytest.mark.slow

CPU = Device(HOST, "cpu")
RECORDS, FEATURES, CLASSES = 24, 6, 3


def records(**extra: Any) -> Arrays:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(RECORDS, FEATURES)).astype(np.float32)
    return Arrays(x, generator.integers(0, CLASSES, RECORDS), **extra)


def records_of_floats() -> Arrays:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(RECORDS, FEATURES)).astype(np.float32)
    return Arrays(x, generator.normal(size=(RECORDS, CLASSES)).astype(np.float32))


def make_job(model: Callable[[], Any], **fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "loss": "sparse_categorical_crossentropy",
        "optimizer": "sgd",
        "train": records(),
        "batch_size": 8,
    }
    return Job(model=model, **(defaults | fields))


def dense_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(5, activation="elu", kernel_regularizer=keras.regularizers.L2(0.1)),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def noisy_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


class Bench:
    """The flat step of a job, with the model's initial values as parameters."""

    def __init__(
        self, job: Job, device: Device = CPU, shards: int = 2, wire: Encoding = "plain"
    ) -> None:
        self.job = job
        self.replica = Replica(job)
        model = self.replica.model
        self.plan: Plan = make_plan([spec for spec, _ in model_variables(model)], shards, "cut")
        self.step = FlatStep(self.replica.make_step(self.plan), self.plan, device, wire)
        self.parameters = ParameterBuffers(Workspace(self.plan, wire, shared=False).sets[0])
        for name, values in self.replica.values(self.plan).items():
            self.parameters.arrays[name][:] = values
        self.read = BatchReader(job, device, self.replica.num_seeds())

    def run(self, batch: BatchId) -> StepResult:
        return self.step(self.parameters.tensors, self.read(batch))

    def by_variable(self, result: StepResult) -> dict[str, Array]:
        found = {}
        arenas = whole(self.plan, result)
        for arena in self.plan.arenas:
            for index, start in zip(arena.order, arena.starts, strict=True):
                spec = self.plan.variables[index]
                flat = arenas[arena.name][start : start + spec.size]
                found[spec.name] = flat.reshape(spec.shape)
        return found


def whole(plan: Plan, result: StepResult) -> dict[str, Array]:
    """What the shards make of their parts: arena name -> ``[length]`` in the arena's dtype."""
    arenas = {}
    for arena in plan.arenas:
        parts = []
        for shard, gradient in enumerate(result.gradients):
            encoded = gradient[arena.name]
            dtype = wire_dtype(encoded.encoding, arena.dtype)
            parts += [np.zeros(0, arena.dtype), *(part.view(dtype) for part in encoded.parts)]
            assert encoded.nbytes == arena.shard_length(shard) * dtype.itemsize
        arenas[arena.name] = np.concatenate([part.astype(arena.dtype) for part in parts])
    return arenas


FIRST = BatchId(0, 0, 8)


def test_gradients_are_those_of_a_plain_tape_and_regularizers_count() -> None:
    bench = Bench(make_job(dense_model))
    result = bench.run(FIRST)

    model = bench.replica.model
    x, y = bench.job.train.read(bench.job.seed, FIRST)
    with tf.GradientTape() as tape:
        crossentropy = keras.losses.SparseCategoricalCrossentropy()(y, model(x, training=True))
        loss = crossentropy + tf.add_n(model.losses)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])

    assert result.finite
    assert result.loss == pytest.approx(float(loss), rel=1e-6)
    assert float(loss) > float(crossentropy)
    found = bench.by_variable(result)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(found[variable.path], gradient, rtol=1e-5, atol=1e-7)


def test_sample_weights_scale_the_loss_as_in_fit() -> None:
    weights = np.linspace(0, 2, RECORDS, dtype=np.float32)
    bench = Bench(make_job(dense_model, train=records(sample_weight=weights)))
    batch = BatchId(0, 0, RECORDS)
    result = bench.run(batch)
    model = bench.replica.model
    model.compile(loss="sparse_categorical_crossentropy")
    x, y, w = bench.job.train.read(bench.job.seed, batch)
    expected = model.evaluate(x, y, sample_weight=w, batch_size=RECORDS, verbose=0)
    assert result.loss == pytest.approx(expected, rel=1e-6)


def test_state_travels_as_the_change_that_keras_makes() -> None:
    bench = Bench(make_job(noisy_model))
    found = bench.by_variable(bench.run(FIRST))
    model = bench.replica.model
    normalization = model.layers[1]
    x, _ = bench.job.train.read(bench.job.seed, FIRST)
    before = [normalization.moving_mean.numpy(), normalization.moving_variance.numpy()]
    model(x, training=True)
    after = [normalization.moving_mean.numpy(), normalization.moving_variance.numpy()]
    for variable, old, new in zip(
        (normalization.moving_mean, normalization.moving_variance), before, after, strict=True
    ):
        assert np.abs(new - old).max() > 0.01
        np.testing.assert_allclose(found[variable.path], new - old, rtol=1e-5, atol=1e-6)


def test_a_repeated_batch_gives_the_same_bits_anywhere_and_another_batch_other_masks() -> None:
    here, there = Bench(make_job(noisy_model)), Bench(make_job(noisy_model), shards=1)
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
    bench = Bench(make_job(noisy_model))
    before = {name: array.copy() for name, array in bench.parameters.arrays.items()}
    variables = [v.numpy() for v in bench.replica.model.variables]
    for first in (0, 8, 16):
        bench.run(BatchId(0, first, 8))
    for name, array in bench.parameters.arrays.items():
        np.testing.assert_array_equal(array, before[name])
    for variable, value in zip(bench.replica.model.variables, variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_element_is_seen(bad: float) -> None:
    bench = Bench(make_job(dense_model))
    bench.parameters.arrays["float32.trainable"][-1] = bad
    result = bench.run(FIRST)
    assert (result.finite, result.gradients) == (False, ())


def test_large_but_finite_gradients_pass() -> None:
    # The sum of their squares is infinite in float32.
    job = make_job(dense_model, loss=lambda _y, p: 1e30 * p[:, 0])
    bench = Bench(job)
    result = bench.run(FIRST)
    assert result.finite
    assert max(np.abs(update).max() for update in bench.by_variable(result).values()) > 1e25


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_rounded_parameters_give_the_rounded_gradient_at_them(wire: Encoding) -> None:
    rounded, plain = Bench(make_job(noisy_model), wire=wire), Bench(make_job(noisy_model))
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


def test_what_float16_cannot_hold_becomes_the_largest_it_can() -> None:
    bench = Bench(make_job(dense_model, loss=lambda _y, p: 1e6 * p[:, 0]), wire="float16")
    result = bench.run(FIRST)
    assert result.finite
    assert max(np.abs(update).max() for update in bench.by_variable(result).values()) == 65504


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

    result = Bench(make_job(Line, loss=loss, train=Arrays(x, x)), wire=wire).run(FIRST)
    assert result.finite == finite


def test_large_variables_and_small_ones_between_them() -> None:
    def model() -> keras.Model:
        layers = [keras.layers.Dense(512, activation="elu") for _ in range(3)]
        return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])

    bench = Bench(make_job(model, loss="mse", train=records_of_floats()), shards=3)
    result = bench.run(FIRST)
    assert max(len(gradient["float32.trainable"].parts) for gradient in result.gradients) > 1
    found = bench.by_variable(result)
    x, y = bench.job.train.read(bench.job.seed, FIRST)
    trained = bench.replica.model
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((trained(x) - y) ** 2)
    gradients = tape.gradient(loss, [v.value for v in trained.trainable_variables])
    for variable, gradient in zip(trained.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(found[variable.path], gradient, rtol=1e-4, atol=1e-6)


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

    bench = Bench(make_job(model), shards=3, wire=wire)
    assert {arena.dtype for arena in bench.plan.arenas} == {"float32"}
    trained = bench.replica.model
    # As they come, maybe rounded.
    assign(bench, bench.parameters.arrays["float32.trainable"].astype(np.float32))
    result = bench.run(FIRST)
    x, y = bench.job.train.read(bench.job.seed, FIRST)
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy()(y, trained(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in trained.trainable_variables])
    assert result.finite
    assert result.loss == pytest.approx(float(loss), rel=1e-2)
    found = bench.by_variable(result)
    for variable, gradient in zip(trained.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(found[variable.path], gradient, rtol=0.1, atol=0.02)


def assign(bench: Bench, values: Array) -> None:
    """Gives the model the values of the trainable arena."""
    arena = bench.plan.arenas[0]
    by_name = {v.path: v for v in bench.replica.model.variables}
    for index, start in zip(arena.order, arena.starts, strict=True):
        spec = bench.plan.variables[index]
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
    bench = Bench(job, shards=3, wire=wire)
    result = bench.run(FIRST)
    assert result.finite
    found = bench.by_variable(result)
    assert found["nothing"].shape == (0, 3)
    assert found["double"].tolist() == [1, 1]
    assert float(found["count"]) == 2
    assert [len(gradient["float64.trainable"].parts) for gradient in result.gradients] == [0, 0, 1]
    # It has nothing to compress; what others have travels as it is.
    compressed = Compressor(bench.plan, "topk", 0.1).compress(result.gradients)
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
    bench = Bench(make_job(TwoInputs, train=Arrays(x, generator.integers(0, CLASSES, RECORDS))))
    first, again = bench.run(FIRST), bench.run(FIRST)
    rows, y = bench.job.train.read(bench.job.seed, FIRST)
    expected = keras.losses.SparseCategoricalCrossentropy()(y, bench.replica.model(rows))
    assert first.loss == again.loss == pytest.approx(float(expected), rel=1e-5)


def test_an_error_in_the_step_names_the_users_code() -> None:
    job = make_job(dense_model, train=Arrays(records().read_range(0, 8)[0], np.full(8, 99)))
    bench = Bench(job)
    for _ in range(2):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"(?s)test_flat.*label value of 99"
        ):
            bench.run(FIRST)


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
    bench = Bench(make_job(TwoTypes, loss=loss, train=Arrays(x, y)))
    assert [arena.name for arena in bench.plan.arenas] == [
        "float32.trainable",
        "float64.trainable",
    ]
    found = bench.by_variable(bench.run(FIRST))
    model = bench.replica.model
    rows, labels = bench.job.train.read(0, FIRST)
    with tf.GradientTape() as tape:
        value = loss(labels, model(rows))
    gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(
            found[variable.path], tf.convert_to_tensor(gradient), rtol=1e-5, atol=1e-6
        )


class Line(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    """``y = a x + b`` with a running mean of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = tf.Variable(2.0)
        self.offset = tf.Variable([1.0])
        self.mean = tf.Variable(0.0, trainable=False)


def line_loss(line: Line, x: Any, y: Any) -> Any:
    line.mean.assign(0.5 * line.mean + 0.5 * tf.reduce_mean(x))
    if tf.reduce_sum(x) < -1e9:  # becomes part of the graph, as in any tf.function
        return tf.reduce_mean(x)
    return tf.reduce_mean((line.slope * x + line.offset - y) ** 2)


def test_a_plain_module() -> None:
    x = np.linspace(1, 3, RECORDS, dtype=np.float32)
    bench = Bench(make_job(Line, loss=line_loss, train=Arrays(x, 3 * x)))
    result = bench.run(FIRST)
    rows, y = bench.job.train.read(0, FIRST)
    error = 2 * rows + 1 - y
    found = bench.by_variable(result)
    assert result.loss == pytest.approx(float(np.mean(error**2)))
    assert float(found["slope"]) == pytest.approx(float(np.mean(2 * error * rows)), rel=1e-5)
    assert float(found["offset"][0]) == pytest.approx(float(np.mean(2 * error)), rel=1e-5)
    assert float(found["mean"]) == pytest.approx(0.5 * float(rows.mean()), rel=1e-5)
    # The next step starts from the parameters again, not from what the last one left behind.
    again = bench.by_variable(bench.run(FIRST))
    assert float(again["mean"]) == pytest.approx(float(found["mean"]))


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    def loss(_line: Line, x: Any, _y: Any) -> Any:
        return x

    x = np.ones(RECORDS, np.float32)
    with pytest.raises(InvalidJob, match=r"loss has shape \(8,\)"):
        Bench(make_job(Line, loss=loss, train=Arrays(x, x))).run(FIRST)


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
