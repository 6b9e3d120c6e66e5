"""The workloads as the benchmarks run them: real clusters, small ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.steps import step_ms
from benchmarks.workloads import CASES, MNIST, Dense
from psrpc.checkpoint import load_variables
from worker.loader import load_job

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
