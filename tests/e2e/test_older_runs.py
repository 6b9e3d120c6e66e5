"""Run directories that an earlier version wrote, interrupted at a checkpoint: ``runs/*.tar.gz``.

Each was started by ``coordinator up jobs/JOB.py --mode MODE --shards 2 --workers 2 --insecure --set
epochs=20 --set checkpoint_every=40`` and stopped by SIGINT; ``sync-end.npz`` holds the variables
that version had in the end."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from psrpc.checkpoint.checkpoint import exported_variables
from psrpc.checkpoint.manifest import read_manifest
from tests.e2e.cluster import JOBS, Run, up

pytestmark = pytest.mark.slow

RUNS = Path(__file__).parent / "runs"


def go_on(name: str, job: str, mode: str, run_dir: Path) -> Run:
    """Unpacks a run and resumes it with the code of today."""
    with tarfile.open(RUNS / f"{name}.tar.gz") as packed:
        packed.extractall(run_dir, filter="data")
    sets = ("--set", "epochs=20", "--set", "checkpoint_every=40")
    cluster = ("--shards", "2", "--workers", "2", "--insecure")
    return up(JOBS / f"{job}.py", run_dir, "--resume", "--mode", mode, *cluster, *sets)


def test_a_sync_run_of_an_earlier_version_ends_as_it_would_have(tmp_path: Path) -> None:
    run = go_on("sync", "dense", "sync", tmp_path)
    assert run.summary["counted"]["counted"] == 1240
    assert run.summary["global_step"] == 420
    found = exported_variables(run.checkpoint, read_manifest(run.checkpoint))
    with np.load(RUNS / "sync-end.npz") as expected:
        assert {name.replace("/", "|") for name in found} == set(expected)
        for name, value in found.items():
            # Not the same bits: another processor may round products in another order.
            np.testing.assert_allclose(value, expected[name.replace("/", "|")], 1e-4, 1e-5)


def test_an_async_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    run = go_on("async", "dense", "async", tmp_path)
    assert run.summary["counted"]["counted"] == 1240
    assert run.summary["eval"]["accuracy"] > 0.95


@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 draws other baskets of the seed")
def test_tables_of_an_earlier_version_go_on(tmp_path: Path) -> None:
    run = go_on("tables", "baskets", "sync", tmp_path)
    assert run.summary["counted"]["counted"] == 420
    assert run.summary["eval"]["loss"] == pytest.approx(1.715447, rel=1e-4)
