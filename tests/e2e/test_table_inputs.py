"""Inputs of an embedding table, right and wrong: words in lines of any length, a batch that
is not finite, ids that a table has not, and two layers that do not agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from psrpc.checkpoint.rows_chain import load_table
from tests.e2e.cluster import up

pytestmark = pytest.mark.slow

RECORDS, BATCH = 64, 8

HEAD = f"""
import keras, numpy as np, tensorflow as tf
from worker import Arrays, Embedding, Job
RECORDS, BATCH = {RECORDS}, {BATCH}
y = np.ones(RECORDS, "float32")
def loss(weights, total):
    # The gradient of a row is -weight / BATCH for each time that a record names it.
    return -tf.reduce_sum(weights[:, None] * total) / BATCH
def job_with(model, x, train=Arrays, **fields):
    return Job(model=model, train=train(x, y), loss=loss, batch_size=BATCH, engine="numpy",
               optimizer=keras.optimizers.SGD(float(BATCH)), replicas=1, **fields)
"""

WORDS = """
# A word of its own, one that all have, and up to two blanks.
x = np.array([[f"word {n}", "a", "", ""][: 2 + n % 3] + [""] * (2 - n % 3) for n in range(RECORDS)])
y[3] = np.nan
class Lines(keras.Model):
    def __init__(self):
        super().__init__()
        self.rows = Embedding(4, combiner="sum", initializer="zeros", name="words")
    def call(self, x):
        return self.rows(tf.RaggedTensor.from_tensor(x, padding=""))
job = job_with(Lines, x, epochs=1)
"""

A = 3694432073954588156
"""The id of "a"; tests/worker/embedding/test_embedding.py has it as well."""


def test_words_in_ragged_lines_beside_a_batch_that_is_not_finite(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(HEAD + WORDS)
    run = up(job, tmp_path / "run", "--mode", "async", "--shards", "2")
    assert (run.summary["batches"], run.summary["skipped"]) == (RECORDS // BATCH, 1)
    table = load_table(run.checkpoint, "words")
    trained = RECORDS - BATCH
    assert len(table.ids) == trained + 1, "the words of the skipped batch have no rows"
    own = table.ids != A
    assert (table.values[own] == 1).all()
    assert (table.counts[own] == 1).all()
    assert (table.values[~own] == trained).all()
    assert table.counts[~own].tolist() == [RECORDS // BATCH - 1]


def test_layers_that_do_not_agree_about_their_table(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        HEAD
        + """
def model():
    ids = keras.Input((), dtype="int64")
    rows = [Embedding(n, table="shared", name=f"of_{n}")(ids) for n in (4, 8)]
    return keras.Model(ids, keras.layers.Concatenate()(rows))
job = job_with(model, np.arange(RECORDS))
"""
    )
    run = up(job, tmp_path / "run", check=False)
    assert run.code == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert "layers 'of_4' and 'of_8' both name table 'shared', but width is 4 in the first" in line
    assert not (run.run_dir / "checkpoints").exists(), "nothing has begun"


def test_an_id_that_its_table_has_not(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        HEAD
        + """
class Later(Arrays):
    # Not in the first batch, which is looked at before the job begins.
    def read(self, seed, batch):
        ids, weights = super().read(seed, batch)
        return (np.where(ids == ids[0], 1000, ids) if batch.first else ids), weights
def model():
    ids = keras.Input((), dtype="int64")
    return keras.Model(ids, Embedding(4, 100, table="users", name="user")(ids))
job = job_with(model, np.arange(RECORDS), Later)
"""
    )
    run = up(job, tmp_path / "run", check=False)
    assert run.code == 1, run.stderr
    why = "layer 'user' was given id 1000, which table 'users' has not: its ids are 0 to 99"
    assert why in run.stderr
    assert why in run.summary["reason"]
    assert "Traceback" not in run.stderr
