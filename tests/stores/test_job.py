"""A whole job by URLs: its data, the checkpoint that it begins with, and its exports."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import load

from tests.e2e.cluster import ended, up
from tests.stores.conftest import Bucket

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

RECORDS, BATCH = 64, 16

JOB = f"""
import keras, numpy as np, tensorflow as tf
from worker import Csv, Embedding, Job, setting
def loss(worth, rows):
    # With this learning rate each record adds its worth to its row.
    return -tf.reduce_sum(worth[:, None] * rows) / {BATCH}
def model():
    x = keras.Input((1,), dtype="int64")
    table = Embedding(2, {RECORDS}, initializer="zeros", name="things")
    return keras.Model(x, keras.layers.Flatten()(table(x)))
data = Csv(setting("data", ""), y="worth", x=["thing"], x_dtype="int64", y_dtype="float32")
job = Job(model=model, loss=loss, optimizer=keras.optimizers.SGD({BATCH}.0), engine="numpy",
          train=data, batch_size={BATCH}, mode="sync", replicas=1)
"""


def test_data_initial_rows_and_exports_by_url(tmp_path: Path, bucket: Bucket) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    lines = "".join(f"{i},{i + 1}\n" for i in range(RECORDS))
    data = bucket.put("data.csv", f"thing,worth\n{lines}".encode())
    first = up(job, tmp_path / "first", "--shards", "2", "--set", f"data={data}")
    kept = bucket.put_folder(first.checkpoint, "kept")
    again = ["--set", f"data={data}", "--set", f"init_from={kept}"]
    second = up(job, tmp_path / "second", "--shards", "1", *again)

    for to in (["--tables", bucket.url("tables")], ["--to", bucket.url("model.keras")]):
        done = ended("coordinator", "export", second.run_dir, *to)
        assert done.returncode == 0, done.stderr
        assert f"wrote {to[1]}" in done.stderr
    expected = np.repeat(2.0 * np.arange(1, RECORDS + 1)[:, np.newaxis], 2, axis=1)
    table = load(bucket.get("tables/things.safetensors"))
    np.testing.assert_array_equal(table["rows"], expected)
    (tmp_path / "model.keras").write_bytes(bucket.get("model.keras"))
    model = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(model(np.arange(RECORDS)[:, np.newaxis]), expected)


def test_errors_in_a_url_are_reported_before_training(tmp_path: Path, bucket: Bucket) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    run = up(
        *(job, tmp_path / "run", "--set", f"data={bucket.url('no.csv')}"),
        check=False,
    )
    assert run.code == 2
    assert f"error PS106: train: Csv: there is no file '{bucket.url('no.csv')}'" in run.stderr
