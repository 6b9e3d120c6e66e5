"""``from pserver import …``: what a job file imports, whatever lies beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pserver
import worker

SHADOWS = ("worker", "coordinator", "psrpc")

JOB = """
import keras
import numpy as np
from pserver import Arrays, Job

job = Job(
    model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
    loss="mse", optimizer="sgd", batch_size=2, epochs=1,
    train=Arrays(np.zeros((4, 1), "float32"), np.zeros((4, 1), "float32")),
)
print(job.epochs)
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A directory with a job file and modules that are called like our packages."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the one that was wanted')\n")
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def run(beside: Path, *arguments: str) -> str:
    done = subprocess.run(
        arguments, cwd=beside, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_packages_offer_the_same() -> None:
    more = {"Cluster", "Role", "RowReader", "Security", "launch", "predictions"}
    more |= {"space", "tune"}
    assert {*worker.__all__, *more} == {*pserver.__all__}
    for name in worker.__all__:
        assert getattr(worker, name) is getattr(pserver, name)
    for module in (pserver, worker):
        with pytest.raises(AttributeError, match="has no attribute 'Jobs'"):
            _ = module.Jobs


def test_the_import_brings_neither_tensorflow_nor_the_worker() -> None:
    unwanted = {"tensorflow", "keras", "numpy", "worker"}
    code = f"import sys, pserver; print(*({unwanted!r} & set(sys.modules)))"
    assert run(Path.cwd(), sys.executable, "-c", code).split() == []


@pytest.mark.slow
def test_a_file_of_the_users_does_not_shadow_ours_in_a_script(beside: Path) -> None:
    assert run(beside, sys.executable, "job.py") == "1\n"


@pytest.mark.slow
def test_a_file_of_the_users_does_not_shadow_ours_in_a_command(beside: Path) -> None:
    command = Path(sys.executable).with_name("worker")
    assert json.loads(run(beside, str(command), "describe", "job.py").splitlines()[-1])


@pytest.mark.slow
def test_a_file_of_the_users_does_not_shadow_ours_in_a_cluster(beside: Path) -> None:
    command = Path(sys.executable).with_name("coordinator")
    ended = run(beside, str(command), "up", "job.py", "--workers", "1", "--insecure")
    assert "2 of 2" in ended


def test_a_module_imported_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("")
    code = "import worker; from pserver import Job"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (
        f"{tmp_path / 'worker.py'} is called 'worker' like a package of tf-pserver" in done.stderr
    )
