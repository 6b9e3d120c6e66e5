"""A job whose data is Parquet: every record is counted once, from several files."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from tests.e2e.cluster import ended, up

pytestmark = pytest.mark.slow

RECORDS, BATCH = 64, 16

JOB = f"""
import keras, tensorflow as tf
from pserver import Embedding, Job, Parquet, setting
def loss(worth, rows):
    # With this learning rate each record adds its worth to its rows, whose ids are in a list.
    return -tf.reduce_sum(worth[:, None] * rows) / {BATCH}
def model():
    x = keras.Input((2,), dtype="int64")
    table = Embedding(1, {2 * RECORDS}, initializer="zeros", name="things")
    return keras.Model(x, keras.layers.Flatten()(table(x)))
data = Parquet(setting("data", ""), y="worth", x="things")
job = Job(model=model, loss=loss, optimizer=keras.optimizers.SGD({BATCH}.0), engine="numpy",
          train=data, batch_size={BATCH}, epochs=2, mode="async")
"""


def test_every_record_of_all_files_is_counted_once_an_epoch(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "data").mkdir()
    for part in range(4):
        ids = np.arange(part * 16, part * 16 + 16)
        table = {"things": [[i, RECORDS + i] for i in ids], "worth": ids + 1.0}
        pq.write_table(pa.table(table), tmp_path / f"data/{part}.parquet", row_group_size=5)
    run = up(
        *(tmp_path / "job.py", tmp_path / "run", "--shards", "2", "--workers", "2"),
        *("--set", f"data={tmp_path / 'data'}"),
    )
    done = ended("coordinator", "export", run.run_dir, "--to", tmp_path / "model.keras")
    assert done.returncode == 0, done.stderr
    model = keras.models.load_model(tmp_path / "model.keras", compile=False)
    ids = np.arange(RECORDS)
    found = np.asarray(model(np.stack([ids, RECORDS + ids], axis=1)))
    assert found.tolist() == [[2 * (i + 1)] * 2 for i in range(RECORDS)]
