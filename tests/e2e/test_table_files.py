"""Files made of a run's tables afterwards: the rows that they evicted, also after a
restart that has gone behind some, another job that begins with their rows, and a Keras model."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from psrpc.checkpoint.rows_chain import load_table
from tests.e2e.cluster import Run, ended, up

pytestmark = pytest.mark.slow

RECORDS, BATCH, EPOCHS, EVERY = 256, 16, 2, 4
ALL = EPOCHS * RECORDS

JOB = f"""
import keras, numpy as np, tensorflow as tf
from worker import Arrays, Embedding, Job, setting
ids = setting("ids", "")
vocabulary = setting("vocabulary", 0) or None
max_rows = setting("max_rows", 0) or None
seen = setting("seen", "")
class Once(Arrays):
    # Every epoch has ids of its own, so each of them is in one update.
    def read(self, seed, batch):
        x, _ = super().read(seed, batch)
        x = x + {RECORDS} * batch.epoch
        return x, (1 + x).astype("float32")
def loss(worth, rows):
    if seen:
        tf.print(worth, rows, summarize=-1, output_stream="file://" + seen)
    # With this learning rate each record adds its worth to its row.
    return -tf.reduce_sum(worth[:, None] * rows) / {BATCH}
def model():
    kept = dict(max_rows=max_rows, evict="age", keep_evicted=True) if max_rows else {{}}
    x = keras.Input((), dtype="int64")
    table = Embedding(2, vocabulary, initializer="zeros", name="things", **kept)
    return keras.Model(x, table(x))
x = np.array(ids.split(","), "int64") if ids else np.arange({RECORDS})
job = Job(model=model, loss=loss, optimizer=keras.optimizers.SGD({BATCH}.0), engine="numpy",
          train=Once(x, np.zeros(len(x), "float32")), batch_size={BATCH}, mode="sync", replicas=1,
          checkpoint_every={EVERY}, keep_checkpoints=2)
"""


def sets(**settings: object) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def export(run: Run, *to: str | Path) -> None:
    done = ended("coordinator", "export", run.run_dir, *to)
    assert done.returncode == 0, done.stderr


def files_of(run: Run, to: Path) -> tuple[set[int], set[int]]:
    """The ids of the evicted rows and of the others, as a user gets them; all rows are as they
    were left."""
    export(run, "--evicted", to / "evicted", "--tables", to / "tables")
    found = []
    for kind in ("evicted", "tables"):
        table = load_file(to / kind / "things.safetensors")
        np.testing.assert_array_equal(table["rows"], worth(table["ids"], 1))
        found.append(set(table["ids"].tolist()))
    return found[0], found[1]


def worth(ids: npt.ArrayLike, times: int) -> npt.NDArray[np.float32]:
    """Rows that were in so many updates."""
    return np.repeat(times * (1 + np.asarray(ids, np.float32))[:, np.newaxis], 2, axis=1)


def rows_seen(path: Path) -> dict[int, list[float]]:
    """The rows that the loss was given, by their ids: each step prints ``[worths] [[row] ...]``."""
    worths, rows = path.read_text().strip().split("] [[")
    ids = [int(float(word)) - 1 for word in worths.strip("[]").split()]
    values = [float(word) for word in re.findall(r"[-\d.e+]+", rows)]
    return dict(zip(ids, np.reshape(values, (len(ids), -1)).tolist(), strict=True))


def test_evicted_rows_a_job_that_begins_with_rows_and_a_keras_model(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    first = up(job, tmp_path / "run", "--shards", "2", *sets(epochs=1, max_rows=64))
    evicted, there = files_of(first, tmp_path / "first")
    assert evicted | there == set(range(RECORDS))
    assert not evicted & there
    assert len(there) <= 64

    # The newest checkpoint is damaged, so the run goes on from the one before. There is room now:
    # what the lost steps have evicted stays.
    assert first.checkpoint.name == "step-00000016"
    for path in first.checkpoint.glob("rows-0-*"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    more = sets(epochs=EPOCHS, max_rows=352)
    second = up(job, tmp_path / "run", "--shards", "1", "--resume", *more)
    lost = evicted
    evicted, there = files_of(second, tmp_path / "second")
    assert evicted | there == set(range(ALL))
    assert not evicted & there
    assert len(there) <= 352
    assert lost & there, "nothing was evicted in the steps that do not count"

    # Another job begins with these rows, on other shards, with a vocabulary.
    asked = [*sorted(there)[:8], *sorted(evicted)[:8]]
    begin = sets(
        epochs=1,
        init_from=second.checkpoint,
        vocabulary=ALL,
        ids=",".join(map(str, asked)),
        seen=tmp_path / "seen",
    )
    third = up(job, tmp_path / "third", "--shards", "2", *begin)
    table = load_table(third.run_dir / "checkpoints" / "step-00000000", "things")
    assert set(table.ids.tolist()) == there
    np.testing.assert_array_equal(table.values, worth(table.ids, 1))
    pulled = rows_seen(tmp_path / "seen")
    assert pulled == {id_: [(1.0 + id_) * (id_ in there)] * 2 for id_ in asked}

    export(third, "--to", tmp_path / "model.keras")
    # Custom code is not needed: it is an ordinary layer.
    exported = keras.models.load_model(tmp_path / "model.keras", compile=False)
    (layer,) = (one for one in exported.layers if one.name == "things")
    assert type(layer) is keras.layers.Embedding
    times = np.array([(id_ in there) + (id_ in asked) for id_ in range(ALL)])
    expected = worth(np.arange(ALL), 1) * times[:, np.newaxis]
    np.testing.assert_array_equal(layer.get_weights()[0], expected)
