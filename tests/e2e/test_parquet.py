"""A job whose data is Parquet: every record is counted once, from several files."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from tests.e2e.cluster import ended, up
from tests.e2e.parquet_job import counting_job

pytestmark = pytest.mark.slow

RECORDS, BATCH = 64, 16

JOB = counting_job(RECORDS, BATCH, 2)


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
