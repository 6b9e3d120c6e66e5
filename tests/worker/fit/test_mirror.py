"""A caller's model as the mirror of checkpoints, which the engines of real shards have made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from pserver.updates.engine import EngineKind
from psrpc.checkpoint.checkpoint import ShardState, verify
from psrpc.checkpoint.load import load_state
from psrpc.checkpoint.manifest import read_manifest
from psrpc.core.errors import CheckpointError, InvalidJob
from psrpc.core.plan import MEAN_SQUARE
from tests.pserver.engine_cases import Shards, gradients, serialized
from tests.psrpc.builders import write_and_commit
from tests.pserver.updates.test_engine_equality import CUT, IN_NUMPY_TOO, NAMED, WHOLE
from worker import Embedding
from worker.fit.mirror import Mirror
from worker.model.loss_scale import inner
from worker.model.variables import model_variables

layers = keras.layers

OPTIMIZERS = {
    **NAMED,
    **IN_NUMPY_TOO,
    **CUT,
    **{name: each for name, each in WHOLE.items() if name != "weight-decay exclusion"},
    "Muon": serialized("Muon"),
    "global norm": serialized("Adam", global_clipnorm=1.0),
}
BY_NUMPY = NAMED | IN_NUMPY_TOO

INTEGERS = "int64.state"

APPLIED = (
    {"epoch": 0, "applied": [[0, 64]], "skipped": [], "totals": [1.5, 64.0, 3.0, 64.0]},
    {"epoch": 1, "applied": [[0, 8], [16, 24]], "skipped": [[16, 24]], "totals": [0.1, 8.0]},
)


class Counter(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """State in dtypes that shards hold as int64."""

    def build(self, shape: Any) -> None:
        add = self.add_weight
        self.count = add(shape=(), dtype="int32", initializer="zeros", trainable=False, name="n")
        self.begun = add(shape=(2,), dtype="bool", initializer="zeros", trainable=False, name="b")
        self.small = add(shape=(3,), dtype="uint8", initializer="ones", trainable=False, name="s")
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count.assign(self.count + 1)
            self.begun.assign([True, False])
        return x


def build() -> keras.Model:
    """A layer in two places, two dtypes, an empty variable's neighbours, state and a matrix."""
    shared = layers.Dense(4, name="shared", activation="tanh")
    x = keras.Input((4,), name="x")
    y = layers.BatchNormalization(name="norm")(shared(layers.Dropout(0.5)(shared(x))))
    y = Counter(name="counter")(y)
    y = layers.Dense(3, dtype="float64", name="double")(y)
    return keras.Model(x, layers.Dense(2, name="head")(y), name="net")


def compiled(optimizer: Mapping[str, Any], make: Callable[[], keras.Model] = build) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = make()
    made = getattr(keras.optimizers, optimizer["class_name"])
    model.compile(made.from_config(dict(optimizer["config"])), "mse", metrics=["mae"])
    return model


def named(model: keras.Model) -> dict[str, np.ndarray]:
    return {spec.name: variable.numpy() for spec, variable in model_variables(model)}


class Trained:
    """Shards that have taken ``steps`` steps from the values of a model."""

    def __init__(
        self,
        model: keras.Model,
        optimizer: Mapping[str, Any],
        shards: int,
        kind: EngineKind,
        steps: int = 3,
    ) -> None:
        self.specs = [spec for spec, _ in model_variables(model)]
        values = {
            spec.name: value.astype(spec.dtype)
            for spec, value in zip(self.specs, named(model).values(), strict=True)
        }
        self.shards = Shards(kind, optimizer, shards, self.specs, values)
        self.shards.train(range(steps))
        self.step = steps

    def checkpoint(self, folder: Path, **more: Any) -> Path:
        """Writes what the shards hold."""
        states = []
        for shard, engine in enumerate(self.shards.engines):
            values, slots = engine.freeze()
            # Not what random gradients make of them, which no model has.
            values |= {n: np.arange(len(a)) % 2 for n, a in values.items() if n == INTEGERS}
            applied = APPLIED if not shard else [{**e, "totals": []} for e in APPLIED]
            applied = [{k: v for k, v in e.items() if v or k != "totals"} for e in applied]
            elements = {**slots.elements, **{slot: make(values) for slot, make in more.items()}}
            states.append(
                ShardState(
                    values, elements, slots.variables, slots.scalars, self.step + shard, applied
                )
            )
        folder.mkdir(parents=True)
        return write_and_commit(folder, self.shards.plan, states, self.step, generation=4)


def assert_same_state(one: Path, other: Path) -> None:
    """That shards restore the same bits from both."""
    manifest, copy = read_manifest(one), read_manifest(other)
    verify(other, copy)
    same = ("run_id", "global_step", "generation", "plan", "optimizer", "seed", "details")
    assert [getattr(manifest, name) for name in same] == [getattr(copy, name) for name in same]
    for shard in range(manifest.plan.shards):
        first, second = (load_state(each, manifest.plan, shard) for each in (one, other))
        assert first.version == second.version
        assert first.applied == second.applied
        assert bits(first) == bits(second)


def bits(state: ShardState) -> Any:
    groups = [state.values, state.scalars, *state.elements.values(), *state.variables.values()]
    names = [list(group) for group in groups], list(state.elements), list(state.variables)
    arrays = [
        (array.dtype.name, array.shape, array.tobytes())
        for group in groups
        for array in group.values()
    ]
    return names, arrays


def assert_same_bits(one: keras.Model, other: keras.Model) -> None:
    variables = [[*m.weights, *inner(m.optimizer).variables] for m in (one, other)]
    for mine, its in zip(*variables, strict=True):
        assert mine.numpy().tobytes() == its.numpy().tobytes(), mine.path


def step(model: keras.Model, specs: Any, number: int) -> None:
    """Takes an optimizer's step of :func:`gradients`, as :class:`Shards` do."""
    given = gradients(number, specs)
    found = {spec.name: (spec, variable) for spec, variable in model_variables(model)}
    trained = [(given[n], v) for n, (spec, v) in found.items() if spec.role == "trainable"]
    model.optimizer.apply(*zip(*trained, strict=True))
    for name, (spec, variable) in found.items():
        if spec.role == "state" and spec.dtype == "float32":
            variable.assign_add(given[name])


def there_and_back(folder: Path, name: str, kind: EngineKind, shards: int) -> None:
    """Checks one optimizer in all ways that need no training function."""
    optimizer = OPTIMIZERS[name]
    trained = Trained(compiled(optimizer), optimizer, shards, kind)
    checkpoint = trained.checkpoint(folder / "shards" / "tmp")
    model = compiled(optimizer)
    mirror = Mirror(model)
    mirror.load(checkpoint)
    expected = trained.shards.values()
    for key, value in named(model).items():
        if value.dtype.kind == "f":
            np.testing.assert_array_equal(value, expected[key], err_msg=key)
    every = optimizer["config"].get("gradient_accumulation_steps") or 1
    assert int(model.optimizer.iterations) == trained.step // every
    assert not mirror.changed()
    mirror.save(checkpoint, checkpoint.with_name("copy"))
    assert_same_state(checkpoint, checkpoint.with_name("copy"))

    # From here plain Keras goes on as the shards do, up to the association of terms.
    trained.shards.train(range(3, 6))
    for number in range(3, 6):
        step(model, trained.specs, number)
    assert mirror.changed()
    expected = trained.shards.values()
    for key, value in named(model).items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(value, expected[key], rtol=2e-6, atol=2e-6, err_msg=key)

    # What never left Keras, and what went through a checkpoint, go on with the same bits.
    mirror.save(checkpoint, checkpoint.with_name("later"))
    other = compiled(optimizer)
    Mirror(other).load(checkpoint.with_name("later"))
    for number in range(6, 9):
        step(model, trained.specs, number)
        step(other, trained.specs, number)
    assert_same_bits(model, other)


@pytest.mark.parametrize("name", ["momentum", "Adam"])
def test_the_state_of_an_optimizer_comes_and_goes(tmp_path: Path, name: str) -> None:
    there_and_back(tmp_path, name, "numpy", 2)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", BY_NUMPY)
def test_all_optimizers_of_the_numpy_engine(tmp_path: Path, name: str, shards: int) -> None:
    there_and_back(tmp_path, name, "numpy", shards)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_optimizers_of_the_keras_engine(tmp_path: Path, name: str) -> None:
    there_and_back(tmp_path, name, "keras", 1 if name == "global norm" else 2)
