"""State of integers and booleans: counted, not measured."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from psrpc.checkpoint.load import load_state
from psrpc.core.batch import BatchId
from psrpc.core.placement import make_plan
from tests.worker.described_jobs import described
from tests.worker.export.test_export import arbitrary, flat_values, write_checkpoint
from tests.worker.flat_jobs import CLASSES, FEATURES, RECORDS, JobStepper, make_job
from tests.worker.keras_jobs import train, train_with_keras
from tests.worker.step.test_local_steps import Local, sgd
from worker import Arrays
from worker.export.export import export
from worker.job.loader import load_job
from worker.model.variables import model_variables
from worker.step.replica import Replica

pytestmark = pytest.mark.slow
layers = keras.layers

BATCHES = [BatchId(0, first, 8) for first in (0, 8, 16)]


class Seen(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Counts batches and records in several dtypes, and notes that it has begun."""

    def build(self, shape: Any) -> None:
        add = self.add_weight
        # Trainable, as Keras takes any variable to be that is not said to be otherwise.
        self.batches = add(shape=(), dtype="int32", initializer="zeros", name="batches")
        self.records = add(shape=(2,), dtype="uint8", initializer="ones", name="records")
        self.begun = add(shape=(), dtype="bool", initializer="zeros", name="begun")
        self.fixed = add(shape=(3,), dtype="int8", initializer="ones", name="fixed")
        self.huge = add(
            shape=(), dtype="uint64", name="huge", initializer=lambda *_, **__: np.uint64(2**64 - 2)
        )
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.batches.assign(self.batches + 1)
            self.records.assign(self.records + keras.ops.cast(keras.ops.shape(x)[0], "uint8"))
            self.begun.assign(True)
        # What comes out depends on the state, so a wrong one would train another model.
        factor = keras.ops.cast(self.batches + keras.ops.cast(self.begun, "int32"), "float32")
        return x / (1.0 + factor) * keras.ops.cast(self.fixed[0], "float32")


def counting_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input((FEATURES,)), Seen(name="seen"), layers.Dense(CLASSES, activation="softmax")]
    )


def adapted_model() -> keras.Model:
    norm = layers.Normalization()
    norm.adapt(np.arange(4 * FEATURES, dtype=np.float32).reshape(4, FEATURES))
    return keras.Sequential(
        [keras.Input((FEATURES,)), norm, layers.Dense(CLASSES, activation="softmax")]
    )


# Plain Keras looks for gradients of integers, too.
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("model", [counting_model, adapted_model])
@pytest.mark.parametrize("shards", [1, 2])
def test_one_worker_in_rounds_trains_as_keras_does(
    model: Callable[[], keras.Model], shards: int
) -> None:
    job = make_job(model)
    ours = train(job, [[batch] for batch in BATCHES], shards=shards)
    expected = train_with_keras(job, BATCHES)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            ours[name].astype(value.dtype), value, rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_a_round_takes_the_values_of_its_highest_batch() -> None:
    job = make_job(counting_model)
    ours = train(job, [BATCHES[:2], [BATCHES[2], BatchId(1, 0, 6)]])
    assert int(ours["sequential/seen/batches"]) == 2
    # Of 8 records in the first round, and of 6, the batch of the next epoch, in the second.
    assert ours["sequential/seen/records"].tolist() == [15, 15]
    assert bool(ours["sequential/seen/begun"])
    assert ours["sequential/seen/huge"].astype(np.uint64) == np.uint64(2**64 - 2)


def test_without_rounds_the_update_that_comes_last_counts() -> None:
    job = make_job(counting_model)
    ours = train(job, [[BATCHES[0], BatchId(1, 0, 6)], [BATCHES[1]]], "async")
    assert int(ours["sequential/seen/batches"]) == 2
    assert ours["sequential/seen/records"].tolist() == [15, 15]


def test_the_description_says_that_they_are_state() -> None:
    found = {v["name"]: (v["dtype"], v["role"]) for v in described(model=sized_model)["variables"]}
    state = {name for name, kind in found.items() if kind == ("int64", "state")}
    names = ("batches", "records", "begun", "fixed", "huge")
    assert state == {f"sequential/seen/{name}" for name in names}


def sized_model() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Seen(name="seen"), layers.Dense(3)])


class Module(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    def __init__(self) -> None:
        super().__init__()
        self.slope = tf.Variable(2.0)
        self.steps = tf.Variable(3, dtype=tf.int32)
        self.odd = tf.Variable(True, trainable=False)


def module_loss(module: Module, x: Any, y: Any) -> Any:
    module.steps.assign_add(1)
    module.odd.assign(tf.logical_not(module.odd))
    return tf.reduce_mean((module.slope * x - y) ** 2)


def test_a_module_counts_too() -> None:
    x = np.linspace(1, 3, RECORDS, dtype=np.float32)
    job = make_job(Module, loss=module_loss, train=Arrays(x, 3 * x))
    ours = train(job, [[batch] for batch in BATCHES])
    assert int(ours["steps"]) == 6
    assert not ours["odd"]


def test_local_steps_go_on_counting() -> None:
    local = Local(counting_model, sgd(0.1))
    pushed = local.pushed(BatchId(0, 0, RECORDS))
    arena = next(a for a in local.plan.arenas if a.dtype == "int64")
    names = [local.plan.variables[index].name for index in arena.order]
    start = arena.starts[names.index("sequential/seen/batches")]
    assert pushed[arena.name][start] == 3


ADAPTED = """
import keras
import numpy as np
from worker import Arrays, Job

def adapted():
    layer = keras.layers.Normalization()
    layer.adapt(np.arange(12, dtype=np.float32).reshape(3, 4))
    return keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])

job = Job(model=adapted, loss="mse", optimizer="sgd", batch_size=2,
          train=Arrays(np.ones((6, 4), np.float32), np.ones(6, np.float32)))
"""


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_an_export_has_the_state_of_the_checkpoint_and_computes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "adapted.py"
    path.write_text(ADAPTED)
    replica = Replica(load_job(path).job)
    checkpoint = write_checkpoint(tmp_path, replica)
    expected = flat_values(replica, scale=1)
    export(str(path), checkpoint, str(tmp_path / "m.keras"))
    export(str(path), checkpoint, str(tmp_path / "served/"))
    loaded = keras.models.load_model(tmp_path / "m.keras")
    mean, variance, count, kernel, bias = (expected[v.path] for v in replica.model.weights)
    assert [int(v.numpy()) for v in loaded.weights if v.name == "count"] == [int(count)]
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    by_hand = (x - mean) / np.sqrt(variance) @ kernel + bias
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(loaded(x), by_hand, rtol=1e-5)
    np.testing.assert_allclose(served.serve(x), by_hand, rtol=1e-5)


def test_every_worker_normalizes_by_what_the_shards_hold() -> None:
    """Not by what its own ``adapt()`` has come to, as of a worker with other data."""
    stepper = JobStepper(make_job(adapted_model))
    x, _ = stepper.job.train.read(0, BATCHES[0])
    before = stepper.run(BATCHES[0]).loss
    (layer,) = (
        one for one in stepper.replica.model.layers if isinstance(one, layers.Normalization)
    )
    layer.adapt(100 * x)
    assert stepper.run(BATCHES[0]).loss == before
    fresh = JobStepper(make_job(adapted_model))
    fresh.replica.model.layers[0].adapt(100 * x)
    assert fresh.run(BATCHES[0]).loss == before


def test_a_layer_that_draws_from_python_while_it_is_traced_draws_alike_everywhere() -> None:
    def model() -> keras.Model:
        image = keras.Input((FEATURES,))
        shown = layers.AugMix()(layers.Reshape((2, 1, 3))(image))
        return keras.Model(image, layers.Dense(CLASSES, "softmax")(layers.Flatten()(shown)))

    losses = set()
    for draws in range(4):
        stepper = JobStepper(make_job(model))
        # As a worker does that had to try a call again.
        for _ in range(draws):
            random.random()
        before = random.getstate()
        losses.add(stepper.run(BATCHES[0]).loss)
        assert random.getstate() == before
    assert len(losses) == 1


class CallsCounted(keras.Model):  # type: ignore[misc]
    """Counts in inference, too, and has its variables from its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen(name="seen")
        self.calls = self.add_weight(shape=(), dtype="int64", initializer="zeros", name="calls")
        self.out = layers.Dense(CLASSES, activation="softmax")

    def call(self, x: Any, training: bool = False) -> Any:
        self.calls.assign(self.calls + 1)
        return self.out(self.seen(x, training=training))


def test_to_build_a_model_is_no_step() -> None:
    ours = train(make_job(CallsCounted), [[batch] for batch in BATCHES])
    (calls,) = (int(value) for name, value in ours.items() if name.endswith("calls"))
    assert calls == 3


def test_another_number_of_shards_goes_on_with_a_checkpoint(tmp_path: Path) -> None:
    replica = Replica(make_job(counting_model))
    checkpoint = write_checkpoint(tmp_path, replica)
    plan = make_plan([spec for spec, _ in model_variables(replica.model)], 3, "cut")
    loaded = [load_state(checkpoint, plan, shard).values for shard in range(3)]
    (arena,) = (each for each in plan.arenas if each.dtype == "int64")
    found = np.concatenate([values[arena.name] for values in loaded])
    assert found.dtype == np.int64
    assert found.tolist() == arbitrary(arena).tolist()
