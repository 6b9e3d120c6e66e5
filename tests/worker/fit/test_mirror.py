"""A caller's model as the mirror of checkpoints, which the engines of real shards have made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import cycle
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
from tests.pserver.updates.test_engine_equality import CUT, IN_NUMPY_TOO, NAMED, WHOLE
from tests.psrpc.builders import write_and_commit
from worker.fit.mirror import Mirror
from worker.model.loss_scale import inner
from worker.model.variables import model_variables

layers = keras.layers

OPTIMIZERS = {
    **NAMED,
    **IN_NUMPY_TOO,
    **CUT,
    **{name: each for name, each in WHOLE.items() if name != "weight-decay exclusion"},
    # With a rate Keras multiplies float64 by float32.
    "Muon": serialized("Muon", rms_rate=None),
}
BY_NUMPY = NAMED | IN_NUMPY_TOO
OWN = {"AdamW", "Adam with amsgrad"}
STATES = [name for name in OPTIMIZERS if name in OWN or name not in IN_NUMPY_TOO]
"""Without schedules, clipping and weight decay, which keep nothing beside the slots of an optimizer
that is there."""

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
    """A layer in two places, floats of two dtypes, and state of several."""
    shared = layers.Dense(4, name="shared", activation="tanh")
    x = keras.Input((4,), name="x")
    y = layers.BatchNormalization(name="norm")(shared(layers.Dropout(0.5, name="drop")(shared(x))))
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
        without: Collection[str] = (),
    ) -> None:
        self.specs = [spec for spec, _ in model_variables(model, without)]
        values = {spec.name: named(model)[spec.name].astype(spec.dtype) for spec in self.specs}
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
    model = compiled(optimizer)
    trained = Trained(model, optimizer, shards, kind)
    checkpoint = trained.checkpoint(folder / "shards" / "tmp")
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shards"), [*zip(BY_NUMPY, cycle((1, 2, 3)), strict=False)])
def test_all_optimizers_of_the_numpy_engine(tmp_path: Path, name: str, shards: int) -> None:
    there_and_back(tmp_path, name, "numpy", shards)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shards"), [*zip(STATES, cycle((1, 2)), strict=False)])
def test_all_optimizers_of_the_keras_engine(tmp_path: Path, name: str, shards: int) -> None:
    there_and_back(tmp_path, name, "keras", shards)


ADAM = serialized("Adam", learning_rate=0.1)


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])


def trained(tmp_path: Path, model: keras.Model, optimizer: Any = ADAM, **more: Any) -> Path:
    return Trained(model, optimizer, 2, "numpy").checkpoint(tmp_path / "shards" / "tmp", **more)


def test_what_a_callback_changes_is_seen_and_goes_back(tmp_path: Path) -> None:
    model = compiled(ADAM, dense)
    checkpoint = trained(tmp_path, model)
    mirror = Mirror(model)
    assert mirror.changed()
    mirror.load(checkpoint)
    assert not mirror.changed()
    model.optimizer.learning_rate = 0.5
    assert not mirror.changed()

    # The same number, and other bits.
    bias = model.layers[1].bias
    bias.assign(np.zeros(2))
    mirror.save(checkpoint, checkpoint.with_name("zeros"))
    mirror.load(checkpoint.with_name("zeros"))
    bias.assign([0.0, -0.0])
    assert mirror.changed()
    mirror.load(checkpoint.with_name("zeros"))
    assert not mirror.changed()

    model.optimizer._momentums[0].assign(model.optimizer._momentums[0] + 1)
    assert mirror.changed()
    mirror.load(checkpoint)
    model.optimizer.iterations.assign(0)
    assert mirror.changed()
    mirror.save(checkpoint, checkpoint.with_name("begun"))
    other = compiled(ADAM, dense)
    other.optimizer.learning_rate = 0.5
    Mirror(other).load(checkpoint.with_name("begun"))
    assert int(other.optimizer.iterations) == 0
    assert_same_bits(model, other)

    mirror.load(checkpoint)
    model.compile("adam", "mse")
    assert mirror.changed()


def test_not_a_number_stays_what_it_is(tmp_path: Path) -> None:
    model = compiled(ADAM, dense)
    mirror = Mirror(model)
    checkpoint = trained(tmp_path, model)
    model.layers[0].kernel.assign(np.full((4, 3), np.nan))
    mirror.save(checkpoint, checkpoint.with_name("copy"))
    mirror.load(checkpoint.with_name("copy"))
    assert not mirror.changed()
    model.layers[0].kernel.assign(np.full((4, 3), -np.nan))
    assert mirror.changed()


@pytest.mark.parametrize("sparse", [False, True])
def test_an_update_in_place_does_not_reach_what_was_loaded(tmp_path: Path, sparse: bool) -> None:
    """The variables have the memory of the arrays that were read."""
    model = compiled(serialized("SGD"), dense)
    mirror = Mirror(model)
    checkpoint = trained(tmp_path, model, serialized("SGD"))
    for variable in model.weights:
        mirror.load(checkpoint)
        if sparse:
            variable.value.scatter_nd_add([[0]], variable.value[:1])
        else:
            variable.value.assign_add(variable.value)
        assert mirror.changed(), variable.path


def test_slots_that_keras_has_not_are_kept(tmp_path: Path) -> None:
    """Those of delay compensation."""

    def squares(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: array * array for name, array in values.items() if "trainable" in name}

    model = compiled(ADAM, dense)
    checkpoint = trained(tmp_path, model, **{MEAN_SQUARE: squares})
    mirror = Mirror(model)
    mirror.load(checkpoint)
    mirror.save(checkpoint, checkpoint.with_name("copy"))
    assert_same_state(checkpoint, checkpoint.with_name("copy"))


def test_what_a_crash_has_left_is_replaced_and_no_checkpoint(tmp_path: Path) -> None:
    model = compiled(ADAM, dense)
    checkpoint = trained(tmp_path, model)
    mirror = Mirror(model)
    left = checkpoint.with_name(".tmp-copy")
    left.mkdir()
    (left / "shard-0-of-2.safetensors").write_text("torn")
    mirror.save(checkpoint, checkpoint.with_name("copy"))
    verify(checkpoint.with_name("copy"), read_manifest(checkpoint.with_name("copy")))
    assert not left.exists()
    with pytest.raises(CheckpointError, match="copy is there already"):
        mirror.save(checkpoint, checkpoint.with_name("copy"))
    with pytest.raises(CheckpointError, match="cannot be made: No such file") as refused:
        mirror.save(checkpoint, tmp_path / "nowhere" / "copy")
    assert refused.value.code == "PS504"


class Net(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Makes its layers, which get numbers, in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.Sequential([layers.Dense(4), layers.Dense(4)])
        self.outer = keras.Sequential([layers.Dense(4), layers.Dense(4)])

    def call(self, x: Any) -> Any:
        return self.outer(self.inner(x))


@pytest.mark.slow
def test_a_model_of_other_numbers_is_the_same_model(tmp_path: Path) -> None:
    """As a worker makes it in a process of its own; 10 sorts before 9 as text."""

    def numbered(before: int) -> keras.Model:
        keras.utils.clear_session()
        for _ in range(before):
            layers.Dense(1)
            keras.Sequential()
        model = compiled(ADAM, Net)
        model(np.ones((1, 4)))
        return model

    there, here = numbered(0), numbered(9)
    assert [w.path for w in here.weights] != [w.path for w in there.weights]
    checkpoint = trained(tmp_path, there)
    Mirror(there).load(checkpoint)
    mirror = Mirror(here)
    mirror.load(checkpoint)
    assert_same_bits(here, there)
    mirror.save(checkpoint, checkpoint.with_name("copy"))
    assert_same_state(checkpoint, checkpoint.with_name("copy"))


def test_a_model_without_variables_is_refused_until_it_was_called(tmp_path: Path) -> None:
    built = compiled(ADAM, Net)
    built(np.ones((1, 4)))
    checkpoint = trained(tmp_path, built)
    model = compiled(ADAM, Net)
    mirror = Mirror(model)
    with pytest.raises(InvalidJob, match=r"has no variables yet; call it on a batch"):
        mirror.load(checkpoint)
    model(np.ones((1, 4)))
    mirror.load(checkpoint)
    assert not mirror.changed()


def test_another_model_is_refused_and_keeps_its_values(tmp_path: Path) -> None:
    def widened() -> keras.Model:
        return keras.Sequential([keras.Input((4,)), first, layers.Dense(5, name="second")])

    first = layers.Dense(3, name="first")
    model = compiled(ADAM, lambda: keras.Sequential([keras.Input((4,)), first]))
    checkpoint = trained(tmp_path, model)
    other = compiled(ADAM, widened)
    before = named(other)
    with pytest.raises(
        InvalidJob, match=r"the model has a variable '\w+/second/kernel'"
    ) as refused:
        Mirror(other).load(checkpoint)
    assert refused.value.code == "PS405"
    assert all(np.array_equal(before[name], value) for name, value in named(other).items())
    with pytest.raises(InvalidJob, match=r"the job has a variable '\w+/second/kernel'"):
        Mirror(model).load(trained(tmp_path / "other", other))
    narrow = compiled(
        ADAM, lambda: keras.Sequential([keras.Input((2,)), layers.Dense(3, name="first")])
    )
    with pytest.raises(
        InvalidJob, match=r"first/kernel' is float32\[2, 3\] in the model and .*4, 3"
    ):
        Mirror(narrow).save(checkpoint, checkpoint.with_name("copy"))


@pytest.mark.parametrize(
    ("theirs", "mine", "said"),
    [
        ("SGD", "Adam", "with, Adam, is not that of the job: 'momentums' of .* only in the model"),
        ("Adam", "SGD", "with, SGD, is not that of the job: 'momentums' of .* only in the check"),
    ],
)
def test_another_optimizer_is_refused(tmp_path: Path, theirs: str, mine: str, said: str) -> None:
    model = compiled(serialized(theirs), dense)
    checkpoint = trained(tmp_path, model, serialized(theirs))
    model.compile(mine, "mse")
    with pytest.raises(InvalidJob, match=said):
        Mirror(model).load(checkpoint)
    with pytest.raises(InvalidJob, match=said):
        Mirror(model).save(checkpoint, checkpoint.with_name("copy"))


def test_a_model_that_no_checkpoint_can_mirror_is_refused() -> None:
    model = dense()
    with pytest.raises(InvalidJob, match="is not compiled with an optimizer; call compile"):
        Mirror(model)


def test_a_layer_unfrozen_after_the_optimizer_was_built_is_refused(tmp_path: Path) -> None:
    checkpoint = trained(tmp_path, compiled(ADAM, dense))
    model = compiled(ADAM, dense)
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.layers[0].trainable = True
    with pytest.raises(InvalidJob, match=r"built before variable '.*' became trainable; compile"):
        Mirror(model).load(checkpoint)


def test_a_layer_frozen_meanwhile_is_still_loaded(tmp_path: Path) -> None:
    """It is trained on, as in Keras, until the model is compiled again."""
    model = compiled(ADAM, dense)
    checkpoint = trained(tmp_path, model)
    mirror = Mirror(model)
    mirror.load(checkpoint)
    model.layers[0].trainable = False
    assert not mirror.changed()
    mirror.load(checkpoint)
    mirror.save(checkpoint, checkpoint.with_name("copy"))
    assert_same_state(checkpoint, checkpoint.with_name("copy"))


@pytest.mark.slow
def test_averages_of_variables_without_a_gradient_are_the_variables(tmp_path: Path) -> None:
    """Keras assigns all averages at the end of fit; shards keep those of what they update."""
    averaged = serialized("SGD", use_ema=True)
    model = compiled(averaged, dense)
    spare = model.layers[1].bias
    cluster = Trained(model, averaged, 2, "keras", without={spare.path})
    kept = spare.numpy() + 1
    spare.assign(kept)
    mirror = Mirror(model)
    checkpoint = cluster.checkpoint(tmp_path / "shards" / "tmp")
    mirror.load(checkpoint)
    expected = spare.numpy()
    mirror.save(checkpoint, checkpoint.with_name("copy"))
    assert_same_state(checkpoint, checkpoint.with_name("copy"))
    model.optimizer.finalize_variable_values(model.trainable_variables)
    np.testing.assert_array_equal(spare.numpy(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_fit_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path, policy: str) -> None:
    """With state of BatchNormalization. Seeds and the scale of losses are in no checkpoint."""
    rng = np.random.default_rng(1)
    x, y = rng.random((32, 4)).astype("float32"), rng.random((32, 2)).astype("float32")
    keras.config.set_dtype_policy(policy)
    try:
        models = [compiled(ADAM), compiled(ADAM)]
    finally:
        keras.config.set_dtype_policy("float32")
    one, other = models
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    first = Trained(one, ADAM, 3, "numpy", steps=0).checkpoint(tmp_path / "shards" / "tmp")
    one.fit(x, y, **options)
    Mirror(one).save(first, first.with_name("handed"))
    Mirror(other).load(first.with_name("handed"))
    seeds = [model.get_layer("drop").seed_generator.state for model in models]
    seeds[1].assign(seeds[0])
    if policy == "mixed_float16":
        other.optimizer.dynamic_scale.assign(one.optimizer.dynamic_scale)
        other.optimizer.step_counter.assign(one.optimizer.step_counter)
    assert int(other.optimizer.iterations) == 4
    histories = [model.fit(x, y, **options).history for model in models]
    assert histories[0] == histories[1]
    assert_same_bits(one, other)
