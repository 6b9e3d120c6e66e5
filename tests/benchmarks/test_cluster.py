"""The workloads as the benchmarks run them: real clusters, small ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.row_job import draw
from benchmarks.steps import step_ms
from benchmarks.workloads import CASES, MNIST, Dense, RowsDrawn
from coordinator.export.tables import export_tables
from psrpc.checkpoint.load import load_variables
from psrpc.checkpoint.manifest import read_manifest
from psrpc.core.batch import BatchId
from worker.job.loader import load_job

pytestmark = pytest.mark.slow


def test_a_dense_job_makes_its_steps_with_the_gradient_of_the_peers() -> None:
    with Cluster(Dense(3, (5,), steps=30), shards=2, transport="tcp") as cluster:
        assert cluster.address().startswith("127.0.0.1:")
        (steps,) = cluster.wait()
        trained = load_variables(max((cluster.run_dir / "checkpoints").glob("step-*")))
    assert len(steps.starts) == 30
    assert step_ms([steps], warmup=5) > 0
    expected = np.zeros(5, np.float32)
    for _ in range(30):
        expected -= np.float32(1e-3) * (np.float32(1e-6) * expected + np.float32(1e-9))
    assert len(trained) == 3
    for value in trained.values():
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert not cluster.run_dir.exists()


def test_a_job_of_rows_makes_its_steps_with_the_gradient_of_the_peers(tmp_path: Path) -> None:
    job = tmp_path / "rows.py"
    job.write_text(
        "from benchmarks.row_job import row_job\n"
        "from benchmarks.workloads import RowsDrawn\n\n"
        "job = row_job(RowsDrawn(50, steps=30, vocabulary=20, width=3))\n"
    )
    with Cluster(job, shards=2) as cluster:
        (steps,) = cluster.wait()
        checkpoint = max((cluster.run_dir / "checkpoints").glob("step-*"))
        (table,) = export_tables(checkpoint, read_manifest(checkpoint), tmp_path)
    assert len(steps.starts) == 30
    drawn = RowsDrawn(50, steps=30, vocabulary=20, width=3)
    ids, _ = draw(drawn, np.arange(30)[:, np.newaxis], np.zeros((30, 1), np.float32))
    order = load_job(job).job.train
    expected = np.zeros(20, np.float32)
    for step in range(30):
        (x, _) = order.read(0, BatchId(0, step, 1))
        times = np.bincount(x[0], minlength=20).astype(np.float32)
        expected -= np.float32(1e-3) * times * (np.float32(1e-3) * expected + np.float32(1e-6))
    found = load_file(table.path)
    assert found["ids"].tolist() == np.unique(ids).tolist()
    np.testing.assert_allclose(
        found["rows"], expected[found["ids"], np.newaxis] + np.zeros(3), rtol=1e-5
    )


def test_a_job_that_fails_says_why() -> None:
    with (
        Cluster(Dense(1, (5,), steps=30), settings=["epochs=0"]) as cluster,
        pytest.raises(RunFailed, match=r"epochs.*0.*at least 1"),
    ):
        cluster.address()


def test_a_job_that_does_not_fit_into_memory_is_not_run() -> None:
    too_large = Cluster(Dense(1, (1 << 40,), steps=1))
    why = r"not run: needs about \d+ MB of memory, \d+ MB are free"
    with pytest.raises(RunFailed, match=why), too_large:
        pytest.fail("it was run")


def test_leaving_early_ends_the_job() -> None:
    with Cluster(Dense(1, (5,), steps=10**6)) as cluster:
        cluster.address()
        assert cluster.running
    assert not cluster.running


@pytest.mark.parametrize("job", sorted({case.job for case in CASES}), ids=lambda job: job.stem)
def test_every_case_has_its_job(job: Path) -> None:
    loaded = load_job(job).job
    assert loaded.mode == "async"
    assert loaded.eval is None
    if job.stem in MNIST:
        sizes = zip(MNIST[job.stem].layers, MNIST[job.stem].layers[1:], strict=False)
        shapes = [shape for a, b in sizes for shape in ((a, b), (b,))]
        assert [tuple(v.shape) for v in loaded.model().trainable_variables] == shapes
        assert loaded.batch_size == MNIST[job.stem].batch_size
