"""A model that was handed over trains as the one of the caller."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest

from psrpc.core.errors import InvalidJob
from tests.e2e import fit_models
from worker.handover.models import hand_over, take_over
from worker.model.variables import seed_variables

pytestmark = [
    pytest.mark.slow,
    # Keras copies variables in the old way when it writes them.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``take_over`` changes the process that it runs in."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)


def loss_after_a_step(model: keras.Model, data: tuple[Any, ...]) -> list[Any]:
    """The results of a step of Keras's own, and then of an evaluation."""
    keras.utils.set_random_seed(4)
    x, y, *weights = data
    options = {"sample_weight": weights[0]} if weights else {}
    stepped = model.train_on_batch(x, y, **options, return_dict=True)
    return [stepped, model.test_on_batch(x, y, **options, return_dict=True)]


def same(model: keras.Model, taken: keras.Model, data: tuple[Any, ...]) -> None:
    for one, other in zip(model.weights, taken.weights, strict=True):
        assert one.trainable == other.trainable
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    configs = [each.optimizer.get_config() for each in (model, taken)]
    assert type(model.optimizer) is type(taken.optimizer)
    assert configs[0] == configs[1]
    # A job gives each batch its own seeds.
    for seed in seed_variables(taken):
        seed.assign(keras.ops.zeros_like(seed))
    for seed in seed_variables(model):
        seed.assign(keras.ops.zeros_like(seed))
    assert loss_after_a_step(model, data) == loss_after_a_step(taken, data)


@pytest.mark.parametrize("kind", fit_models.KINDS)
def test_models_of_all_kinds_train_alike(kind: str, tmp_path: Path) -> None:
    model, x, *rest = fit_models.KINDS[kind]()
    hand_over(tmp_path, model, x)
    if kind == "text":
        x = keras.ops.convert_to_tensor(x)  # Keras takes no array of strings
    keras.config.set_dtype_policy("float32")
    taken = take_over(tmp_path)
    assert taken is not model
    same(model, taken, (x, *rest))


NOTEBOOK = """
import keras

FACTOR = 3.0

def make(factor):
    def loss(y_true, y_pred):
        return factor * FACTOR * keras.ops.mean((y_true - y_pred) ** 2, axis=-1)
    return loss

def relu(x):
    return keras.ops.relu(x) - 0.5

class Config:
    units = 5

class Block(keras.layers.Layer):
    def __init__(self, config, parts):
        super().__init__()
        self.config, self._parts = config, parts
        self.dense = keras.layers.Dense(config.units)

    def call(self, x):
        x = self.dense(x)
        for part in self._parts:
            x = part(x)
        return x

class Weighed(keras.losses.Loss):
    def __init__(self, factor):
        super().__init__(name="weighed")
        self.factor = factor

    def call(self, y_true, y_pred):
        return self.factor * keras.ops.mean(abs(y_true - y_pred), axis=-1)

class Linear(keras.layers.Layer):
    def __init__(self, units, *, rate):
        super().__init__()
        self.units = units
        self.rate = rate / 2

    def build(self, shape):
        self.b = self.add_weight(shape=(self.units,), trainable=False)
        self.w = self.add_weight(shape=(shape[-1], self.units), initializer="glorot_uniform")

    def call(self, x):
        return x @ self.w * self.rate + self.b

class Forgetful(keras.Model):
    def __init__(self, units=3, rate=0.5, config=None):
        super().__init__()
        self.parts = {1: keras.layers.Dense(units), "two": [Linear(units, rate=Rate(rate))]}
        self.pair = (keras.layers.Dense(1), units)
        self.again = self.pair[0]
        self.offset = self.add_weight(shape=(units,), initializer="ones")
        self.chosen = self.first

    def first(self, x):
        return self.parts[1](x)

    def call(self, x):
        for part in self.parts["two"]:
            x = part(self.chosen(x)) + self.offset
        return self.again(x)

class Rate(float):
    pass

class Graph(keras.Model):
    def __init__(self, units=3):
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(1)(keras.layers.Dense(units)(inputs))
        super().__init__(inputs=inputs, outputs=outputs)
        self.units = units
"""


@pytest.fixture
def notebook() -> Any:
    """A module that no other process can import."""
    module = ModuleType("a_notebook")
    exec(compile(NOTEBOOK, "a_notebook", "exec"), vars(module))
    return module


def data() -> tuple[Any, Any]:
    generator = np.random.default_rng(2)
    x, y = generator.normal(size=(8, 4)), generator.normal(size=(8, 1))
    return x.astype(np.float32), y.astype(np.float32)


def compiled(model: keras.Model, optimizer: Any = "sgd", **options: Any) -> keras.Model:
    model.compile(optimizer, **{"loss": "mse", **options})
    return model


def test_classes_without_config_are_made_of_their_attributes(notebook: Any, tmp_path: Path) -> None:
    layers = [
        notebook.Block(notebook.Config(), [notebook.relu, keras.layers.Dense(3)]),
        keras.layers.Dense(4, activation="relu"),
        keras.layers.Lambda(lambda x: x * notebook.FACTOR),
        keras.layers.Dense(1, activation=lambda x: x + 1),
    ]
    model = compiled(keras.Sequential([keras.Input((4,)), *layers]))
    hand_over(tmp_path, model)
    same(model, take_over(tmp_path), data())


def test_a_graph_of_a_class_of_its_own_keeps_its_arguments(notebook: Any, tmp_path: Path) -> None:
    model = compiled(notebook.Graph(7))
    hand_over(tmp_path, model)
    same(model, take_over(tmp_path), data())


def test_a_class_may_forget_its_arguments(notebook: Any, tmp_path: Path) -> None:
    model = compiled(notebook.Forgetful(7, rate=0.25))
    hand_over(tmp_path, model, data()[0])
    taken = take_over(tmp_path)
    assert taken.again is taken.pair[0]
    assert len(taken.weights) == 7
    same(model, taken, data())


def test_two_functions_may_have_one_name(notebook: Any, tmp_path: Path) -> None:
    model = compiled(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
        loss=notebook.make(2.0),
        metrics=[
            notebook.make(5.0),
            keras.metrics.MeanMetricWrapper(notebook.make(7.0), name="seven"),
        ],
    )
    hand_over(tmp_path, model)
    same(model, take_over(tmp_path), data())


def test_a_loss_needs_no_config(notebook: Any, tmp_path: Path) -> None:
    model = compiled(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), loss=notebook.Weighed(4.0)
    )
    hand_over(tmp_path, model)
    same(model, take_over(tmp_path), data())


def test_what_was_set_after_the_constructor_is_handed_over(tmp_path: Path) -> None:
    model = fit_models.Forecast(fit_models.Gate(5))
    model.scale.adapt(data()[0])
    model(data()[0])
    for variable in model.trainable_weights:
        variable.assign(variable + 1)
    model.inner.trainable = False
    model.last.bias.trainable = False
    compiled(model, keras.optimizers.AdamW(weight_decay=0.5))
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.optimizer.learning_rate = 0.25
    hand_over(tmp_path, model, data()[0])
    taken = take_over(tmp_path)
    frozen = [layer for layer in taken._flatten_layers() if not layer.trainable]
    assert frozen == [taken.inner, taken.inner.dense]
    same(model, taken, data())


def test_a_step_leaves_the_handed_over_model_alone(tmp_path: Path) -> None:
    model, *batch = fit_models.subclassed()
    hand_over(tmp_path, model, batch[0])
    before = {name: value for name, value in vars(model).items() if name != "_tracker"}
    loss_after_a_step(take_over(tmp_path), (*batch,))
    assert {n: v for n, v in vars(model).items() if n != "_tracker"} == before
    # The state of the optimizer goes another way.
    loss_after_a_step(model, (*batch,))
    (tmp_path / "again").mkdir()
    hand_over(tmp_path / "again", model, batch[0])
    assert not take_over(tmp_path / "again").optimizer.built


class Threshold(keras.metrics.Mean):  # type: ignore[misc]
    """Has an argument that its config leaves out."""

    def __init__(self, above: float) -> None:
        super().__init__(name="threshold")
        self.above = above


def layers_of_one_name(_notebook: Any) -> keras.Model:
    class Gate(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs

    return compiled(keras.Sequential([keras.Input((4,)), Gate(), fit_models.Gate(2)]))


def using_itself(_notebook: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def penalized(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean((y_true - y_pred) ** 2) + keras.ops.mean(model.weights[0])

    return compiled(model, loss=penalized)


REFUSED: list[tuple[Callable[[Any], keras.Model], str]] = [
    (lambda _: compiled(keras.Sequential([keras.layers.Dense(1)])), "has no weights yet; call it"),
    (
        layers_of_one_name,
        "two classes named 'Gate', of tests.worker.handover.*give one of them another",
    ),
    (using_itself, r"penalized\(\) uses 'model', which is the model"),
    (
        lambda _: compiled(
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), metrics=[Threshold(0.5)]
        ),
        "Threshold 'threshold'.*made anew from its config.*get_config",
    ),
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_what_cannot_be_made_again_is_refused(
    make: Callable[[Any], keras.Model], says: str, notebook: Any, tmp_path: Path
) -> None:
    model = make(notebook)
    with pytest.raises(InvalidJob, match=says) as raised:
        hand_over(tmp_path, model)
    assert "\n" not in str(raised.value)
