"""Where the trials of ``coordinator tune`` run, and what is refused before anything starts."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from coordinator.studies import cli
from coordinator.tune.directory import StudyDirectory
from coordinator.tune.options import tune_arguments
from psrpc.core.errors import AlreadyExists, InvalidArgument


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["--on=spark"], "--on is spark: .* call pserver.tune"),
        (["--on=slrm"], "--on is slrm: expected slurm, ray or kubernetes"),
        (["--partition=fast"], "--partition is an option of --on slurm; leave it out"),
        (["--on=ray", "--sbatch=a=b"], "--sbatch is an option of --on slurm"),
        (["--on=kubernetes"], "--image is missing: name an image"),
        (["--on=slurm", "--image=a/b:1"], "--image is an option of --on kubernetes"),
        (["--on=slurm", "--resources=CPU:2"], "--resources is an option of --on ray"),
    ],
)
def test_what_runs_no_trials_is_refused(said: list[str], words: str) -> None:
    args, _ = tune_arguments(["job.py", *said])
    with pytest.raises(InvalidArgument, match=words):
        cli.engine_opener(args)


@pytest.mark.slow  # imports what starts TensorFlow
def test_a_study_that_runs_is_refused_before_the_job_is_read(tmp_path: Path) -> None:
    if not (find_spec("optuna") and find_spec("tensorflow")):
        pytest.skip("needs Optuna and TensorFlow")
    args, _ = tune_arguments(["no-such-job.py", f"--run-dir={tmp_path}"])
    with StudyDirectory(tmp_path), pytest.raises(AlreadyExists, match=f"process {os.getpid()} on"):
        cli.run(args)


def test_this_machine_is_the_default() -> None:
    assert cli.engine_opener(tune_arguments(["job.py", "--trials=3"])[0]) is None
