from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from pserver.updates.allowlist import AVERAGES
from psrpc.checkpoint.checkpoint import ShardState
from psrpc.core.errors import CheckpointError, InvalidArgument, InvalidJob
from psrpc.core.placement import make_plan
from psrpc.core.plan import ArenaPlan
from tests.fresh_interpreter import run_fresh
from tests.psrpc.builders import write_and_commit
from tests.worker.flat_jobs import make_job, noisy_model
from worker.data.source import Array
from worker.describe.describe import describe
from worker.export.check import how_served
from worker.export.export import export, export_main
from worker.job.loader import load_job
from worker.model.variables import model_variables
from worker.step.initializer import initial_values
from worker.step.replica import Replica

pytestmark = [
    pytest.mark.slow,
    # Keras reads its own variables by an interface that numpy 2 wants changed.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

JOB = """
import keras
import numpy as np
import tensorflow as tf
from worker import Arrays, Job

class Line(tf.Module):
    def __init__(self):
        super().__init__()
        self.slope = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def __call__(self, x):
        return self.slope * x

def dense():
    return keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(3, activation="elu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(UNITS),
    ])

job = Job(model=MODEL, loss=LOSS, optimizer="sgd", batch_size=2,
          train=Arrays(np.ones(SHAPE, np.float32), np.ones(6, np.float32)))
"""


def write_job(folder: Path, model: str = "dense", units: int = 1) -> Path:
    module = model == "Line"
    loss = "lambda m, x, y: tf.reduce_mean((m(x) - y) ** 2)" if module else "'mse'"
    names = {
        "MODEL": model,
        "LOSS": loss,
        "SHAPE": "6" if module else "(6, 4)",
        "UNITS": str(units),
    }
    text = JOB
    for name, value in names.items():
        text = text.replace(name, value)
    path = folder / "small.py"
    path.write_text(text)
    return path


def write_checkpoint(folder: Path, replica: Replica, averages: bool = False) -> Path:
    """A checkpoint of two shards with arbitrary values, and averages twice as large."""
    plan = make_plan([spec for spec, _ in model_variables(replica.model)], 2, "cut")
    values = {a.name: arbitrary(a) for a in plan.arenas}
    (folder / "tmp").mkdir()
    states = []
    for shard in range(plan.shards):
        mine = {a.name: values[a.name][a.cuts[shard] : a.cuts[shard + 1]] for a in plan.arenas}
        slot = {name: 2 * array for name, array in mine.items() if name.endswith("trainable")}
        averaged = {AVERAGES: slot} if averages else {}
        states.append(ShardState(values=mine, elements=averaged, version=7))
    return write_and_commit(folder / "tmp", plan, states, 7, run="r")


def arbitrary(arena: ArenaPlan) -> Array:
    values = np.arange(1, arena.length + 1, dtype=arena.dtype)
    return values if arena.replaced else values / arena.length


def flat_values(replica: Replica, scale: float) -> dict[str, Array]:
    """By variable, what :func:`write_checkpoint` wrote; trainable ones times ``scale``."""
    plan = make_plan([spec for spec, _ in model_variables(replica.model)], 1, "cut")
    found = {}
    for arena in plan.arenas:
        flat = arbitrary(arena)
        flat *= scale if arena.role == "trainable" else 1
        for index, start in zip(arena.order, arena.starts, strict=True):
            spec = plan.variables[index]
            found[spec.name] = flat[start : start + spec.size].reshape(spec.shape)
    return found


@pytest.mark.parametrize("averages", [False, True])
def test_plain_keras_loads_what_was_exported(tmp_path: Path, averages: bool) -> None:
    path = write_job(tmp_path)
    replica = Replica(load_job(path).job)
    checkpoint = write_checkpoint(tmp_path, replica, averages)
    expected = flat_values(replica, scale=2 if averages else 1)

    assert export(str(path), checkpoint, str(tmp_path / "m.keras")) == ""
    loaded = keras.models.load_model(tmp_path / "m.keras")
    # A loaded model's paths begin elsewhere; the order of variables is the same.
    for variable, mine in zip(loaded.variables, replica.model.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected[mine.path])

    export(str(path), checkpoint, str(tmp_path / "m.weights.h5"))
    fresh = Replica(load_job(path).job).model
    fresh.load_weights(tmp_path / "m.weights.h5")
    for variable in fresh.variables:
        np.testing.assert_array_equal(variable.numpy(), expected[variable.path])


PLAIN = """
import sys
for name in ("worker", "pserver", "psrpc", "coordinator"):
    sys.modules[name] = None  # importing it fails
import keras
import numpy as np
layers = keras.layers
written_anew = keras.Sequential([
    keras.Input((4,)), layers.Dense(3, activation="elu"), layers.BatchNormalization(),
    layers.Dense(1),
])
written_anew.load_weights("m.weights.h5")
for model in (keras.models.load_model("m.keras"), written_anew):
    print(float(model(np.ones([2, 4], np.float32))[0, 0]))
    model.compile(optimizer="sgd", loss="mse")
    model.fit(np.ones([2, 4]), np.ones([2, 1]), verbose=0)
"""


def test_keras_alone_loads_and_trains_what_was_exported(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    replica = Replica(load_job(path).job)
    checkpoint = write_checkpoint(tmp_path, replica)
    for name in ("m.keras", "m.weights.h5"):
        assert export_main(str(path), str(checkpoint), str(tmp_path / name)) == 0
    replica.assign(flat_values(replica, 1))
    expected = float(np.ravel(replica.model(np.ones((2, 4), np.float32)))[0])
    done = run_fresh(PLAIN, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [float(line) for line in done.stdout.split()] == pytest.approx([expected] * 2, rel=1e-5)


SERVE = """
import sys
import numpy as np
import tensorflow as tf
model = tf.saved_model.load("dense")
print(float(np.ravel(model.serve(np.ones([2, 4], np.float32)))[0]))
model = tf.saved_model.load("Line")
print(float(np.ravel(model(np.ones([2], np.float32)))[0]))
assert not [name for name in sys.modules if name.split(".")[0] in ("worker", "psrpc")]
"""


def test_tensorflow_alone_serves_saved_models(tmp_path: Path) -> None:
    """Of Keras and of a module, in one process."""
    expected = []
    for model, shape in (("dense", (2, 4)), ("Line", (2,))):
        folder = tmp_path / f"job of {model}"
        folder.mkdir()
        path = write_job(folder, model)
        replica = Replica(load_job(path).job)
        checkpoint = write_checkpoint(folder, replica)
        assert export_main(str(path), str(checkpoint), f"{tmp_path / model}/") == 0
        replica.assign(flat_values(replica, 1))
        expected.append(float(np.ravel(replica.model(np.ones(shape, np.float32)))[0]))
    done = run_fresh(SERVE, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [float(line) for line in done.stdout.split()] == pytest.approx(expected, rel=1e-5)


def test_a_refused_export_names_the_obstacle(tmp_path: Path) -> None:
    path = str(write_job(tmp_path))
    checkpoint = write_checkpoint(tmp_path, Replica(load_job(path).job))
    with pytest.raises(InvalidArgument, match=r"m\.h5: expected MODEL\.weights\.h5"):
        export(path, checkpoint, str(tmp_path / "m.h5"))
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        export(path, tmp_path / "none", str(tmp_path / "m.keras"))
    with pytest.raises(InvalidArgument, match="there is no directory"):
        export(path, checkpoint, str(tmp_path / "none" / "m.keras"))
    other = str(write_job(tmp_path, units=2))
    with pytest.raises(InvalidJob, match=r"has shape \(3, 1\) there; the model's has \(3, 2\)"):
        export(other, checkpoint, str(tmp_path / "m.keras"))
    assert not (tmp_path / "m.keras").exists()
    for name in ("there.keras", "there.weights.h5", "there/"):
        (tmp_path / name).touch()
        with pytest.raises(InvalidArgument, match=f"{name}: there is something already; remove"):
            export(path, checkpoint, f"{tmp_path}/{name}")
    module = str(write_job(tmp_path, "Line"))
    (tmp_path / "other").mkdir()
    lines = write_checkpoint(tmp_path / "other", Replica(load_job(module).job))
    with pytest.raises(InvalidArgument, match=r"the model is a tf\.Module"):
        export(module, lines, str(tmp_path / "m.keras"))


def test_the_dependencies_of_a_keras_file_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path)
    own = """
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x

def half(x):
    return x / 2
"""
    text = path.read_text().replace("def dense", own + "\ndef dense", 1)
    text = text.replace(
        'keras.layers.Dense(3, activation="elu")', "Twice(), keras.layers.Dense(3, half)"
    )
    path.write_text(text)
    checkpoint = write_checkpoint(tmp_path, Replica(load_job(path).job))
    to = str(tmp_path / "m.keras")
    assert export_main(str(path), str(checkpoint), to) == 0
    said = capfd.readouterr().out
    assert f"load_model({to!r}, custom_objects={{'Twice': Twice, 'half': half}})" in said
    names = load_job(path).job.model.__globals__
    given = {name: names[name] for name in ("Twice", "half")}
    keras.models.load_model(to, custom_objects=given)


def test_a_model_that_keras_cannot_make_again_is_refused_as_a_keras_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And what is advised instead works."""
    path = write_job(tmp_path, "Net")
    own = """
class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(x)
"""
    path.write_text(path.read_text().replace("def dense", own + "\ndef dense", 1))
    checkpoint = write_checkpoint(tmp_path, trained := Replica(load_job(path).job))
    to = str(tmp_path / "m.keras")
    assert export_main(str(path), str(checkpoint), to) == 2
    assert not list(tmp_path.glob("*m.keras"))
    said = capfd.readouterr().err
    assert f"--to {to} would be a file that keras.models.load_model cannot load: " in said
    assert "Net.__init__() got an unexpected keyword argument" in said
    assert "a SavedModel (--to DIR/), or the values alone (--to MODEL.weights.h5)" in said
    for form in ("served/", "m.weights.h5"):
        assert export_main(str(path), str(checkpoint), f"{tmp_path}/{form}") == 0
    expected = flat_values(trained, 1)
    assert "called on a batch, which builds its layers (build() may not)" in said
    built = Replica(load_job(path).job)
    built.model.load_weights(tmp_path / "m.weights.h5")
    for spec, variable in model_variables(built.model):
        np.testing.assert_array_equal(variable.numpy(), expected[spec.name])
    with_kwargs = path.read_text().replace("__init__(self)", "__init__(self, **kwargs)")
    path.write_text(
        with_kwargs.replace(
            "super().__init__()\n        self.out", ("super().__init__(**kwargs)\n        self.out")
        )
    )
    again = str(tmp_path / "again.keras")
    assert export_main(str(path), str(checkpoint), again) == 0
    assert f"load_model({again!r}, custom_objects={{'Net': Net}})" in capfd.readouterr().out


OUTPUTS = """
import keras
import numpy as np
from worker import Arrays, Job

class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x

class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y["a"] - y_pred["a"]) ** 2)

def own(y, p):
    return keras.ops.mean((y - p) ** 2, -1)

def build():
    x = keras.Input((4,))
    h = AddsLoss()(x) if CASE == "add_loss" else x
    a, b = (keras.layers.Dense(1, name=name)(h) for name in "ab")
    if CASE in ("single", "add_loss"):
        return keras.Model(x, a)
    kind = OwnLoss if CASE == "compute_loss" else keras.Model
    model = kind(x, [a, b] if CASE == "list" else {"a": a, "b": b})
    if CASE == "compiled":
        model.compile("sgd", {"a": own, "b": "mse"}, metrics={"a": ["mae"]})
    if CASE == "function":
        model.compile("sgd", {"a": lambda y, p: (y - p) ** 2, "b": "mse"})
    return model

LOSSES = {"compiled": None, "function": None, "compute_loss": None, "list": ["mse", "mae"],
          "dict": {"a": "mse", "b": "mae"}}
one = np.ones([6, 1], np.float32)
y = {"list": (one, one), "single": one, "add_loss": one}.get(CASE, {"a": one, "b": one})
job = Job(model=build, loss=LOSSES.get(CASE, "mse"), batch_size=2,
          optimizer=None if CASE in ("compiled", "function") else "sgd",
          metrics={"a": ["mae"]} if CASE == "dict" else [],
          train=Arrays(np.ones([6, 4], np.float32), y))
"""


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`:UserWarning")
@pytest.mark.parametrize(
    ("case", "compiled"),
    {
        "dict": False,
        "list": False,
        "single": False,
        "add_loss": False,
        "compute_loss": False,
        "compiled": True,
        "function": True,
    }.items(),
)
def test_plain_keras_loads_the_export_of_any_loss(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str, compiled: bool
) -> None:
    """As the advice says, if there is any: compiled whole, or not at all."""
    path = tmp_path / "outputs.py"
    path.write_text(OUTPUTS.replace("CASE", repr(case)))
    replica = Replica(load_job(path).job)
    checkpoint = write_checkpoint(tmp_path, replica)
    to = f"{tmp_path}/m.keras"
    assert export_main(str(path), str(checkpoint), to) == 0
    said = capfd.readouterr().out
    advised = re.findall(r"load it with (keras.*?\))(?:;|$)", said, re.MULTILINE)
    assert bool(advised) == (case in ("add_loss", "compute_loss", "compiled", "function"))
    if case == "function":
        assert f"keras.models.load_model({to!r}) fails: " in said
        assert "lambda" in said
    call = advised[0] if advised else f"keras.models.load_model({to!r})"
    names = {**load_job(path).job.model.__globals__, "keras": keras}
    loaded = eval(call, names)
    assert (getattr(loaded, "optimizer", None) is not None) == loaded.compiled
    assert loaded.compiled == (compiled and "compile=False" not in call)
    replica.assign(flat_values(replica, scale=1))
    for mine, its in zip(replica.model.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), its.numpy())


def test_how_a_saved_model_is_called_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path)
    checkpoint = write_checkpoint(tmp_path, Replica(load_job(path).job))
    to = f"{tmp_path}/model/"
    assert export_main(str(path), str(checkpoint), to) == 0
    line = f"model = tf.saved_model.load({to!r}); model.serve(x)  # x float32 [n, 4]"
    assert capfd.readouterr().out == f"to use {to}: {line}\n"
    names = {"tf": tf, "x": np.ones((2, 4), np.float32)}
    exec(line.replace("model.serve", "y = model.serve"), names)
    assert names["y"].shape == (2, 1)


SEVERAL = """
import keras
import numpy as np
from worker import Arrays, Job

A, B = np.ones((8, 4), np.float32), np.ones((8, 3), np.float32)
DATA = {"a": A, "b": B}

class Called(keras.Model):
    def __init__(self):
        super().__init__()
        self.one = keras.layers.Dense(1)

    def call(self, x):
        a, b = (x["a"], x["b"]) if isinstance(x, dict) else x
        return self.one(keras.ops.concatenate([a, b], -1))

def functional(nest):
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    h = keras.layers.Concatenate()([a, b])
    return keras.Model([a, b] if nest is list else {"a": a, "b": b}, keras.layers.Dense(1)(h))

job = Job(MODEL, loss="mse", optimizer="sgd", train=Arrays(X, np.zeros(8)), batch_size=4)
"""
TWO = "# a float32 [n, 4], b float32 [n, 3]"


@pytest.mark.parametrize(
    ("model", "x", "call"),
    [
        ("lambda: functional(list)", "DATA", f"model.serve([a, b])  {TWO}"),
        ("lambda: functional(list)", "[A, B]", f"model.serve([a, b])  {TWO}"),
        ("lambda: functional(dict)", "DATA", f"model.serve({{'a': a, 'b': b}})  {TWO}"),
        ("Called", "DATA", f"model.serve({{'a': a, 'b': b}})  {TWO}"),
        ("Called", "[A, B]", "model.serve([x, x1])  # x float32 [n, 4], x1 float32 [n, 3]"),
    ],
)
def test_how_a_saved_model_of_several_inputs_is_called_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, x: str, call: str
) -> None:
    path = tmp_path / "job.py"
    path.write_text(SEVERAL.replace("MODEL", f"model={model}").replace("Arrays(X", f"Arrays({x}"))
    checkpoint = write_checkpoint(tmp_path, Replica(load_job(path).job))
    to = f"{tmp_path}/model/"
    assert export_main(str(path), str(checkpoint), to) == 0
    line = f"model = tf.saved_model.load({to!r}); {call}"
    assert capfd.readouterr().out == f"to use {to}: {line}\n"
    a, b = np.ones((2, 4), np.float32), np.ones((2, 3), np.float32)
    names = {"tf": tf, "a": a, "b": b, "x": a, "x1": b}
    exec(line.replace("model.serve", "y = model.serve"), names)
    assert names["y"].shape == (2, 1)


class Ids(tf.Module):  # type: ignore[misc]
    @tf.function(  # type: ignore[untyped-decorator]
        input_signature=[
            {
                "class": tf.TensorSpec([None, 4], tf.float32),
                "ids": tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1),
                "rate": tf.TensorSpec([], tf.float32),
            }
        ]
    )
    def serve(self, x: Any) -> Any:
        return tf.reduce_sum(x["ids"])


def test_how_ragged_inputs_are_served_and_names_that_python_does_not_take(tmp_path: Path) -> None:
    tf.saved_model.save(Ids(), tmp_path / "ids")
    assert how_served(tmp_path / "ids") == (
        "model.serve({'class': x, 'ids': ids, 'rate': rate})  # x float32 [n, 4], ids ragged int64 "
        "[n, any], rate float32 []"
    )


def test_init_from_a_keras_file_or_a_checkpoint(tmp_path: Path) -> None:
    other = Replica(make_job(noisy_model, seed=5))
    plan = make_plan([spec for spec, _ in model_variables(other.model)], 2, "cut")
    expected = other.values(plan)
    saved = [tmp_path / "m.keras", tmp_path / "m.weights.h5"]
    other.model.save(saved[0])
    other.model.save_weights(saved[1])
    for path in saved:
        found = initial_values(Replica(make_job(noisy_model, init_from=path)), plan)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
    seeded = initial_values(Replica(make_job(noisy_model)), plan)
    assert (seeded["float32.trainable"] != expected["float32.trainable"]).any()

    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for source in (write_checkpoint(checkpoints, other), tmp_path / "run"):
        replica = Replica(make_job(noisy_model, init_from=source))
        found = initial_values(replica, plan)
        for arena in plan.arenas:
            values = np.arange(1, arena.length + 1, dtype=arena.dtype) / arena.length
            np.testing.assert_array_equal(found[arena.name], values)


def test_init_from_what_does_not_fit(tmp_path: Path) -> None:
    wide = keras.Sequential([keras.Input((6,)), keras.layers.Dense(7)])
    wide.save_weights(tmp_path / "wide.weights.h5")
    replica = Replica(make_job(noisy_model, init_from=tmp_path / "wide.weights.h5"))
    plan = make_plan([spec for spec, _ in model_variables(replica.model)], 1, "cut")
    with pytest.raises(InvalidJob, match=r"wide\.weights\.h5' does not fit the model: "):
        initial_values(replica, plan)
    replica = Replica(make_job(noisy_model, init_from=tmp_path / "none.keras"))
    with pytest.raises(InvalidJob, match="there is no such file or directory"):
        initial_values(replica, plan)
    checkpoint = write_checkpoint(tmp_path, Replica(load_job(write_job(tmp_path)).job))
    replica = Replica(make_job(noisy_model, init_from=checkpoint))
    with pytest.raises(InvalidJob, match=r"there is no value for variable|has shape"):
        initial_values(replica, plan)


def test_an_export_refuses_a_setting_that_the_model_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path)
    text = path.read_text() + "\nfrom dataclasses import replace\nfrom worker import setting\n"
    text += "build = job.model\n"
    text += "job = replace(job, model=lambda: setting('units', 1) and build())\n"
    path.write_text(text)
    checkpoint = write_checkpoint(tmp_path, Replica(load_job(path).job))
    assert export_main(str(path), str(checkpoint), str(tmp_path / "late.keras")) == 2
    assert "model(): setting('units') is read after the job file" in capsys.readouterr().err


def test_init_from_another_model_is_refused_when_the_job_is_described(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    checkpoint = write_checkpoint(tmp_path, Replica(load_job(path).job))
    init = [f"init_from={checkpoint}"]
    assert describe(load_job(path, init))["name"] == "small"
    text = path.read_text()
    path.write_text(text.replace("Dense(3,", "Dense(5,"))
    shape = "sequential/dense/kernel has shape (4, 3) there and (4, 5) in the model; "
    with pytest.raises(InvalidJob, match=re.escape(shape)):
        describe(load_job(path, init))
    path.write_text(text.replace("Dense(1)", "Dense(1, name='head')"))
    with pytest.raises(InvalidJob) as raised:
        describe(load_job(path, init))
    assert str(raised.value) == (
        f"init_from {str(checkpoint)!r} is of another model: it has no values for "
        "sequential/head/kernel, sequential/head/bias; it has sequential/dense_1/bias, "
        "sequential/dense_1/kernel, which the model has not"
    )
    keras_file = str(tmp_path / "wide.keras")
    keras.Sequential([keras.Input((6,)), keras.layers.Dense(7)]).save(keras_file)
    with pytest.raises(InvalidJob) as raised:
        describe(load_job(path, [f"init_from={keras_file}"]))
    assert str(raised.value).endswith(
        "wide.keras' does not fit the model: sequential/dense/kernel has shape (6, 7) there and "
        "(4, 3) in the model; the file does not fit layers dense, batch_normalization, head"
    )
    narrow = str(tmp_path / "narrow.keras")
    write_job(tmp_path, units=2)
    other = load_job(path).job.model()
    other.save(narrow)
    write_job(tmp_path)
    with pytest.raises(InvalidJob) as raised:
        describe(load_job(path, [f"init_from={narrow}"]))
    assert str(raised.value) == (
        f"init_from {narrow!r} does not fit the model: sequential/dense_1/kernel has shape (3, 2) "
        "there and (3, 1) in the model; the file does not fit layer dense_1"
    )
