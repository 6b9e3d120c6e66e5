"""Variables of layers that have one path, as those of a model that is loaded twice."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.worker.export.test_export import flat_values, write_checkpoint
from tests.worker.flat_jobs import CLASSES, FEATURES, FIRST, JobStepper, make_job
from worker.describe.describe import describe
from worker.export.export import export
from worker.job.loader import LoadedJob, load_job
from worker.model.variables import model_variables
from worker.step.initializer import initial_values
from worker.step.replica import Replica

pytestmark = [
    pytest.mark.slow,
    # Keras reads its own variables by an interface that numpy 2 wants changed.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
layers = keras.layers

TOWERS = """
import keras
import numpy as np
from worker import Arrays, Job

def towers():
    parts = [keras.models.load_model(BASE) for _ in range(2)]
    parts[0].name, parts[1].name = "left", "right"
    x = keras.Input((6,))
    y = keras.layers.Subtract()([part(x) for part in parts])
    return keras.Model(x, keras.layers.Softmax()(y))

job = Job(model=towers, loss="sparse_categorical_crossentropy", optimizer="sgd", batch_size=2,
          train=Arrays(np.ones((6, 6), np.float32), np.arange(6) % 3))
"""


def saved_base(folder: Path) -> Path:
    keras.utils.clear_session()
    x = keras.Input((FEATURES,))
    y = layers.BatchNormalization()(layers.Dense(4)(x))
    keras.Model(x, layers.Dense(CLASSES)(y)).save(folder / "base.keras")
    return folder / "base.keras"


def towers_job(folder: Path) -> Path:
    path = folder / "towers.py"
    path.write_text(TOWERS.replace("BASE", repr(str(saved_base(folder)))))
    return path


def with_head(base: Path) -> keras.Model:
    x = keras.Input((FEATURES,))
    y = keras.models.load_model(base)(x)
    return keras.Model(x, layers.Dense(CLASSES, activation="softmax")(y))


def names(job: Any, **arguments: str) -> list[str]:
    loaded = LoadedJob(job, Path("/jobs/towers.py"), "ab" * 32, "towers", arguments)
    return [variable["name"] for variable in describe(loaded)["variables"]]


def test_two_towers_of_one_model_are_numbered_in_the_order_of_the_model(tmp_path: Path) -> None:
    job = load_job(towers_job(tmp_path)).job
    found = names(job)
    assert len(set(found)) == len(found) == 16
    assert {"dense/kernel", "dense/kernel#2"} <= set(found)
    assert names(job) == found
    model = Replica(job).model
    one, other = (layer for layer in model.layers if isinstance(layer, keras.Model))
    by_name = {spec.name: variable for spec, variable in model_variables(model)}
    assert by_name["dense/kernel"] is one.layers[1].kernel
    assert by_name["dense/kernel#2"] is other.layers[1].kernel


def test_a_head_whose_layers_are_named_as_those_of_the_base_is_trained(tmp_path: Path) -> None:
    model = partial(with_head, saved_base(tmp_path))
    found = names(make_job(model))
    assert len(set(found)) == len(found) == 10
    stepper = JobStepper(make_job(model))
    gradients = stepper.by_variable(stepper.run(FIRST))
    assert set(gradients) == set(found)
    own = stepper.replica.model
    [head] = [layer for layer in own.layers if isinstance(layer, layers.Dense)]
    [name] = [s.name for s, v in model_variables(own) if v is head.kernel]
    assert gradients[name].shape == (CLASSES, CLASSES)
    assert gradients[name].any()


def test_a_number_is_not_that_of_another_layer() -> None:
    def model() -> keras.Model:
        parts = [layers.Dense(3, name=name) for name in ("a", "b", "c")]
        made: Any = keras.Sequential([keras.Input((FEATURES,)), *parts])
        for layer, path in zip(parts, ("k", "k", "k#2"), strict=True):
            layer.kernel._path = path
        return made

    found = [spec.name for spec, _ in model_variables(model())]
    assert found[::2] == ["k", "k#3", "k#2"]


def test_a_variable_that_no_shard_holds_numbers_none() -> None:
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(3), layers.Dense(3)])
    one, other = (layer.kernel for layer in model.layers)
    other._path = one._path
    (spec, found), *_ = model_variables(model, but=[one, model.layers[0].bias])
    assert (spec.name, found) == (one.path, other)


def test_each_tower_has_its_own_exclusion_from_weight_decay(tmp_path: Path) -> None:
    def optimizer() -> keras.optimizers.Optimizer:
        made = keras.optimizers.AdamW()
        made.exclude_from_weight_decay(var_names=["kernel"])
        return made

    model = partial(with_head, saved_base(tmp_path))
    job = make_job(model, optimizer=optimizer)
    loaded = LoadedJob(job, Path("/jobs/towers.py"), "ab" * 32, "towers", {})
    document = describe(loaded)
    kernels = [v["name"] for v in document["variables"] if "kernel" in v["name"]]
    assert document["optimizer"]["excluded_from_weight_decay"] == kernels


def test_an_export_has_the_values_of_each_tower(tmp_path: Path) -> None:
    path = towers_job(tmp_path)
    replica = Replica(load_job(path).job)
    checkpoint = write_checkpoint(tmp_path, replica)
    expected = flat_values(replica, 1)
    values = [expected[spec.name] for spec, _ in in_order(replica.model)]

    export(str(path), checkpoint, str(tmp_path / "m.keras"))
    loaded = keras.models.load_model(tmp_path / "m.keras")
    for variable, value in zip(loaded.weights, values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)

    for source in (checkpoint, tmp_path / "m.keras"):
        begun = Replica(load_job(path, [f"init_from={source}"]).job)
        names(begun.job)
        plan = JobStepper(begun.job).plan
        initial_values(begun, plan)
        for variable, value in zip(begun.model.weights, values, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)


def in_order(model: keras.Model) -> list[Any]:
    places = {id(variable): place for place, variable in enumerate(model.weights)}
    return sorted(model_variables(model), key=lambda each: places[id(each[1])])
