"""Models with embedding tables as files that know nothing of shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from pserver.tables.initial import InitialRows
from psrpc.core.errors import InvalidArgument, InvalidJob, PsError
from psrpc.core.placement import make_plan
from tests.e2e.cluster import EXAMPLES
from tests.psrpc.rows import DictTable, write_checkpoint
from tests.worker.table_jobs import described
from worker.data.source import Array
from worker.export.check import check_written, own_names
from worker.export.export import export, export_main
from worker.job.loader import load_job
from worker.step.replica import Replica

pytestmark = [
    pytest.mark.slow,
    # Keras reads its own variables by an interface that numpy 2 wants changed.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

V, W, STEP = 9, 4, 7
IDS = np.array([[1, 8, 0], [3, 0, 0], [0, 0, 0], [5, 5, 2]])

JOB = """
import keras
import numpy as np
from worker import Arrays, Embedding, Job

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.words = Embedding(4, 9, name="words")
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(keras.ops.mean(self.words(x), 1))

def plain():
    rows = Embedding(4, 9, name="words")
    both = keras.Sequential([keras.Input((3,), dtype="int64"), rows, keras.layers.Flatten()])
    ids = keras.Input((3,), dtype="int64")
    return keras.Model(ids, keras.layers.Dense(1)(both(ids)))

def combined():
    rows = Embedding(4, 9, combiner="mean", padding=0, name="words")
    return keras.Sequential([keras.Input((3,), dtype="int64"), rows, keras.layers.Dense(1)])

class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.own = self.add_weight(shape=(), name="own")
        self.unnamed = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        return self.own * x + self.unnamed

def pair(first=9, second=9):
    ids = keras.Input((3,), dtype="int64")
    users = Embedding(4, first, name="users")(ids)
    items = Embedding(4, second, name="items")(ids)
    first, second = [keras.ops.sum(Scaled()(rows), 1) for rows in (users, items)]
    return keras.Model(ids, keras.ops.sum(first - 2 * second, 1, keepdims=True))

class Rigid(keras.layers.Layer):
    def __init__(self, size):
        super().__init__()

    def call(self, x):
        return x

def rigid():
    return keras.Sequential([keras.Input((3,), dtype="int64"), Embedding(4, 9, name="words"),
                             Rigid(2), keras.layers.Flatten(), keras.layers.Dense(1)])

class Within(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.rows = Embedding(4, 9, name="words")

    def call(self, ids):
        return self.rows(ids)

def within():
    return keras.Sequential([keras.Input((3,), dtype="int64"), Within(),
                             keras.layers.Flatten(), keras.layers.Dense(1)])

def growing():
    return keras.Sequential([
        keras.Input((3,), dtype="int64"), Embedding(4, combiner="sum"), keras.layers.Dense(1)])

def both(ragged=False, growing=None):
    ids = keras.Input((None if ragged else 3,), dtype="int64", ragged=ragged)
    start = keras.initializers.RandomUniform(0.0, 0.5)
    users = Embedding(4, 9, combiner="sum", name="users")(ids)
    grown = Embedding(4, growing, combiner="sum", padding=0, initializer=start, name="grown")(ids)
    return keras.Model(ids, keras.ops.sum(users - 2 * grown, 1, keepdims=True))

job = Job(model=MODEL, loss="mse", optimizer="sgd", batch_size=2,
          train=Arrays(np.ones((6, 3), np.int64), np.ones(6, np.float32)))
"""


def checkpoint_of(folder: Path, model: str) -> tuple[Path, Path, Array]:
    """A job, a checkpoint of it in which half of the rows are trained, and all rows. Every other
    parameter is :data:`STEP`."""
    job = folder / "small.py"
    job.write_text(JOB.replace("MODEL", model))
    checkpoint, whole = trained(folder, job)
    return job, checkpoint, next(iter(whole.values()))


def trained(folder: Path, job: Path, settings: Sequence[str] = ()) -> tuple[Path, dict[str, Array]]:
    """A checkpoint as in :func:`checkpoint_of`, and all rows of each table with a vocabulary."""
    found = described(load_job(job, settings).job)
    plan = make_plan(found.variables, 2, "cut", found.tables)
    tables, whole = [], {}
    for number, spec in enumerate(plan.tables):
        size = spec.vocabulary or V
        tables.append(DictTable(spec, {}))
        tables[-1].touch(range(0, size, 2), STEP + number)
        rows = whole[spec.name] = np.empty((size, spec.width), np.float32)
        InitialRows(spec).fill(np.arange(size), rows)
        for id_, row in tables[-1].rows.items():
            rows[id_] = row.values
    return write_checkpoint(folder, plan, tables, STEP), whole


def test_a_keras_file_has_an_ordinary_embedding_with_all_rows(tmp_path: Path) -> None:
    job, checkpoint, whole = checkpoint_of(tmp_path, "plain")
    export(str(job), checkpoint, str(tmp_path / "out.keras"))
    model = keras.models.load_model(tmp_path / "out.keras")
    (inner,) = (layer for layer in model.layers if isinstance(layer, keras.Sequential))
    (rows,) = (layer for layer in inner.layers if layer.name == "words")
    assert type(rows) is keras.layers.Embedding
    np.testing.assert_array_equal(rows.get_weights()[0], whole)
    expected = STEP * whole[IDS].reshape(4, -1).sum(1) + STEP
    np.testing.assert_allclose(model.predict(IDS, verbose=0)[:, 0], expected, rtol=1e-5)
    export(str(job), checkpoint, str(tmp_path / "out.weights.h5"))
    for weight in model.weights:
        weight.assign(0 * weight)
    model.load_weights(tmp_path / "out.weights.h5")
    np.testing.assert_allclose(model.predict(IDS, verbose=0)[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("model", ["plain", "combined", "Own"])
def test_a_saved_model_does_all_that_the_layer_does(model: str, tmp_path: Path) -> None:
    job, checkpoint, whole = checkpoint_of(tmp_path, model)
    export(str(job), checkpoint, str(tmp_path / "out/"))
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    served = loaded.serve(IDS).numpy()[:, 0]
    rows = whole[IDS]
    if model == "plain":
        features = rows.reshape(4, -1)
    elif model == "Own":
        features = rows.mean(1)
    else:
        there = (IDS != 0)[..., np.newaxis]
        features = (rows * there).sum(1) / np.maximum(there.sum(1), 1)
    np.testing.assert_allclose(served, STEP * features.sum(1) + STEP, rtol=1e-5)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_growing_table_beside_a_fixed_one_is_served_by_a_saved_model(
    ragged: bool, tmp_path: Path
) -> None:
    """It has rows of the ids 0, 2, ... 8; all others get the mean of the initializer."""
    job, checkpoint, _ = checkpoint_of(tmp_path, f"lambda: both({ragged})")
    if ragged:
        text = job.read_text().replace("Arrays(np.ones((6, 3), np.int64)", "Arrays(BASKETS")
        baskets = "from worker import Ragged\nBASKETS = Ragged.from_rows([[1, 2, 3]] * 6)\n"
        job.write_text(baskets + text)
    whole = trained(tmp_path / "again", job)[1]
    export(str(job), checkpoint, f"{tmp_path}/out/")
    grown = np.where(np.arange(V)[:, np.newaxis] % 2, np.float32(0.25), whole["grown"])
    known = np.array([[1, 8, 2], [6, 0, 0], [0, 0, 0], [5, 5, 2]])
    expected = whole["users"][known] - 2 * grown[known] * (known != 0)[..., np.newaxis]
    ids = tf.RaggedTensor.from_tensor(known) if ragged else known
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    served = loaded.serve(ids).numpy()
    np.testing.assert_allclose(served[:, 0], expected.sum((1, 2)), rtol=1e-5)


def test_a_growing_table_without_rows_serves_the_mean_of_its_initializer(tmp_path: Path) -> None:
    text = JOB.replace("MODEL", "growing")
    job = tmp_path / "small.py"
    job.write_text(text)
    found = described(load_job(job).job)
    plan = make_plan(found.variables, 1, "cut", found.tables)
    checkpoint = write_checkpoint(tmp_path, plan, [DictTable(plan.tables[0], {})], STEP)
    export(str(job), checkpoint, f"{tmp_path}/out/")
    ids = np.array([[2**63 - 1, -(2**63), 0]])
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    served = loaded.serve(ids).numpy()
    assert served.tolist() == [[STEP]], "of rows of zeros the dense layer's bias is left"


@pytest.mark.parametrize(
    ("model", "to", "kind", "why"),
    [
        ("growing", "out.keras", InvalidArgument, "growing table; .*cannot grow; .*--tables"),
        ("both", "out.weights.h5", InvalidArgument, "growing table; .*cannot grow; .*SavedModel"),
        ("combined", "out.keras", InvalidArgument, "'mean'; .*cannot do that; .*SavedModel"),
        ("Own", "out.weights.h5", InvalidArgument, r"SavedModel"),
        (
            "rigid",
            "out.keras",
            InvalidArgument,
            r"'rigid'.*TypeError.*take \*\*kwargs.*weights\.h5",
        ),
        ("within", "out.keras", InvalidArgument, "'words' is within layer 'within'; .*SavedModel"),
    ],
)
def test_a_refused_export_names_what_can_be_exported(
    model: str, to: str, kind: type[PsError], why: str, tmp_path: Path
) -> None:
    job, checkpoint, _ = checkpoint_of(tmp_path, model)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind, match=why):
        export(str(job), checkpoint, f"{tmp_path}/{to}")
    assert sorted(tmp_path.iterdir()) == before


def all_forms(
    job: Path, checkpoint: Path, folder: Path, settings: Sequence[str] = ()
) -> tuple[keras.Model, list[Callable[[Any], Array]]]:
    """Exports to each form and loads that by Keras or TensorFlow alone: the model of the Keras
    file, and what each form predicts."""
    for name in ("out.keras", "out.weights.h5", "out/"):
        export(str(job), checkpoint, f"{folder}/{name}", settings)
    needed = own_names(folder / "out.keras")
    names = load_job(job, settings).job.model.__globals__
    layers = {name: names[name] for name in needed}
    if needed:
        with pytest.raises(TypeError, match="Could not locate class"):
            keras.models.load_model(folder / "out.keras")
    model, other = (
        keras.models.load_model(folder / "out.keras", custom_objects=layers) for _ in range(2)
    )
    for weight in other.weights:
        weight.assign(0 * weight)
    other.load_weights(folder / "out.weights.h5")
    loaded = tf.saved_model.load(str(folder / "out"))
    return model, [
        lambda x: model.predict(x, verbose=0),
        lambda x: other.predict(x, verbose=0),
        lambda x: loaded.serve(x).numpy(),
    ]


@pytest.mark.parametrize(("model", "second"), [("pair", V), ("lambda: pair(9, 5)", 5)])
def test_two_tables_keep_their_own_rows(model: str, second: int, tmp_path: Path) -> None:
    job, checkpoint, _ = checkpoint_of(tmp_path, model)
    whole = trained(tmp_path / "again", job)[1]
    assert {name: len(rows) for name, rows in whole.items()} == {"users": V, "items": second}
    ids = IDS % second
    users, items = [(STEP * whole[name][ids] + STEP).sum((1, 2)) for name in ("users", "items")]
    for predict in all_forms(job, checkpoint, tmp_path)[1]:
        np.testing.assert_allclose(predict(ids)[:, 0], users - 2 * items, rtol=1e-4)
    written = tf.saved_model.load(str(tmp_path / "out")).variables
    assert {"users/embeddings:0", "items/embeddings:0"} < {v.name for v in written}


@pytest.mark.parametrize("network", ["factors", "towers"])
def test_the_ratings_example_in_every_form(network: str, tmp_path: Path) -> None:
    job, settings = EXAMPLES / "movielens.py", ["data=synthetic", f"network={network}"]
    checkpoint, whole = trained(tmp_path, job, settings)
    ids = {"user": np.array([0, 1, 399]), "item": np.array([299, 0, 2])}
    users, items = whole["users"][ids["user"]], whole["items"][ids["item"]]
    vectors = [rows[:, 1:] for rows in (users, items)]
    if network == "towers":
        hidden = [np.maximum(STEP * v.sum(1, keepdims=True) + STEP, 0) for v in vectors]
        vectors = [np.tile(32 * STEP * h + STEP, 32) for h in hidden]
    expected = users[:, 0] + items[:, 0] + (vectors[0] * vectors[1]).sum(1) + STEP
    for predict in all_forms(job, checkpoint, tmp_path, settings)[1]:
        np.testing.assert_allclose(predict(ids)[:, 0], expected, rtol=1e-4)


def test_the_clicks_example_with_a_vocabulary_in_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    job = tmp_path / "clicks.py"
    text = (EXAMPLES / "criteo_deepfm.py").read_text()
    for old, new in (
        ("1 + FACTORS,", "1 + FACTORS, 50,"),
        (')(inputs["categorical"])', ')(inputs["categorical"] % 50)'),
        ('"sigmoid"', '"linear"'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    job.write_text(text)
    settings = ["rows=200", "eval_rows=10", "batch_size=100"]
    checkpoint, whole = trained(tmp_path, job, settings)
    model, predictions = all_forms(job, checkpoint, tmp_path, settings)
    for weight in model.weights:
        table = weight.path.startswith("categories/")
        np.testing.assert_array_equal(weight.numpy(), whole["categories"] if table else STEP)
    generator = np.random.default_rng(0)
    x = {
        "numeric": generator.random((4, 13), np.float32),
        "categorical": generator.integers(0, 50, (4, 26)),
    }
    first, *others = (predict(x) for predict in predictions)
    assert np.ptp(first) > 0
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-5)


@pytest.mark.parametrize("to", ["out.keras", "out.weights.h5", "out/"])
def test_an_export_with_wrong_rows_is_not_left_behind(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, checkpoint, _ = checkpoint_of(tmp_path, "pair")
    before = sorted(tmp_path.iterdir())
    assign = Replica.assign
    give = keras.layers.Embedding.save_own_variables

    def spoil(replica: Replica, values: Any, but: Any = ()) -> None:
        assign(replica, values, but)
        for variable in but:
            variable.assign(variable + 1)

    def spoilt(layer: keras.layers.Embedding, store: Any) -> None:
        layer.embeddings.assign(layer.embeddings + 1)
        give(layer, store)

    monkeypatch.setattr(Replica, "assign", spoil)
    monkeypatch.setattr(keras.layers.Embedding, "save_own_variables", spoilt)
    says = r"was to hold the rows of table '(users|items)'"
    with pytest.raises(PsError, match=r"layer 'users' does not hold" if to == "out/" else says):
        export(str(job), checkpoint, f"{tmp_path}/{to}")
    assert sorted(tmp_path.iterdir()) == before


def test_a_written_model_without_the_rows_is_found(tmp_path: Path) -> None:
    job, checkpoint, whole = checkpoint_of(tmp_path, "pair")
    export(str(job), checkpoint, f"{tmp_path}/out/")
    check_written(tmp_path / "out", "saved_model", {"users": whole})
    with pytest.raises(PsError, match=r"out was to hold the rows of table 'users'"):
        check_written(tmp_path / "out", "saved_model", {"users": whole + 1})


@pytest.mark.parametrize("to", ["out.keras", "out/"])
def test_a_checkpoint_of_other_tables(to: str, tmp_path: Path) -> None:
    job, checkpoint, _ = checkpoint_of(tmp_path, "pair")
    job.write_text(JOB.replace("MODEL", "lambda: pair(9, 5)"))
    says = r"'items' of 5 rows of 4, and the checkpoint has 'items' of 9 rows of 4, 'users' of 9"
    with pytest.raises(InvalidJob, match=says) as caught:
        export(str(job), checkpoint, f"{tmp_path}/{to}")
    assert caught.value.code == "PS405"


def test_whatever_goes_wrong_has_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job, checkpoint, _ = checkpoint_of(tmp_path, "plain")

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("mean/variable_1")

    monkeypatch.setattr(Replica, "assign", fail)
    assert export_main(str(job), str(checkpoint), f"{tmp_path}/out.keras") == 2
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith(f"error PS699: the export of {job} to {tmp_path}/out")
    assert "KeyError: 'mean/variable_1'" in said.splitlines()[-1]
