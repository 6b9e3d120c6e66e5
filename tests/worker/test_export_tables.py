"""Models with embedding tables as files that know nothing of shards."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from pserver.tables.initial import InitialRows
from psrpc.errors import InvalidArgument, InvalidJob, PsError
from psrpc.plan import make_plan
from tests.psrpc.rows import DictTable, write_checkpoint
from tests.worker.tables_bench import described
from worker.data import Array
from worker.export import export
from worker.loader import load_job

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

def growing():
    return keras.Sequential([
        keras.Input((3,), dtype="int64"), Embedding(4, combiner="sum"), keras.layers.Dense(1)])

job = Job(model=MODEL, loss="mse", optimizer="sgd", batch_size=2,
          train=Arrays(np.ones((6, 3), np.int64), np.ones(6, np.float32)))
"""


def checkpoint_of(folder: Path, model: str) -> tuple[Path, Path, Array]:
    """A job, a checkpoint of it in which half of the rows are trained, and all rows. Every other
    parameter is :data:`STEP`."""
    job = folder / "small.py"
    job.write_text(JOB.replace("MODEL", model))
    found = described(load_job(job).job)
    plan = make_plan(found.variables, 2, "cut", found.tables)
    table = DictTable(plan.tables[0], {})
    table.touch(range(0, V, 2), STEP)
    whole = np.empty((V, W), np.float32)
    InitialRows(table.spec).fill(np.arange(V), whole)
    for id_, row in table.rows.items():
        whole[id_] = row.values
    return job, write_checkpoint(folder, plan, [table], STEP), whole


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


@pytest.mark.parametrize(
    ("model", "to", "kind", "why"),
    [
        ("growing", "out/", InvalidJob, r"no fixed vocabulary.*coordinator export RUN --tables"),
        ("combined", "out.keras", InvalidArgument, r"'words' has combiner='mean'.*SavedModel"),
        ("Own", "out.weights.h5", InvalidArgument, r"SavedModel"),
    ],
)
def test_what_cannot_be_exported_says_what_can(
    model: str, to: str, kind: type[PsError], why: str, tmp_path: Path
) -> None:
    job, checkpoint, _ = checkpoint_of(tmp_path, model)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind, match=why):
        export(str(job), checkpoint, f"{tmp_path}/{to}")
    assert sorted(tmp_path.iterdir()) == before
