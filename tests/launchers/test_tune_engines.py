"""Studies whose trials are batch jobs of a real Slurm, or tasks of a real Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.cluster import JOBS, Process, command, processes_of, until, wait_until_gone
from tests.e2e.test_tune import summary, table
from tests.launchers.slurm_engine import slurm
from tests.launchers.test_ray import engine as ray_engine
from tests.launchers.test_ray import parent
from tests.launchers.test_slurm import epochs

__all__ = ["ray_engine"]

pytestmark = [pytest.mark.launchers, pytest.mark.long, pytest.mark.timeout(900)]
pytest.importorskip("optuna")

EPOCHS = 40
BATCHES = EPOCHS * 40


def tuned(study: Path, *more: str, **env: str) -> Process:
    """Starts a study of one trial, or goes on with it."""
    said = ("--trials", "1", "--pruner", "none", "--sampler", "random", "--no-dashboard")
    space = ("--space", "optimizer.learning_rate=uniform(0.01, 0.1)", "--set", f"epochs={EPOCHS}")
    words: tuple[str | Path, ...] = ("tune", JOBS / "searched.py", "--run-dir", study)
    words = (*words, *said, *space, "--set", "checkpoint_every=100", *more)
    # Ray takes subprocess.Popen for a class, which it is not in a fork of the tests.
    line = command("coordinator", *words) if "ray" in more else ()
    return Process("tune", "coordinator", *words, line=line, **env)


def task_of(study: Path) -> int:
    """Returns the process that the task of the trial runs."""
    [found] = [
        pid
        for pid in processes_of(study)
        if b"coordinator.studies.trial_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def until_trained(study: Path, running: Process, least: int) -> None:
    run = study / "trial-0000"
    until(lambda: running.popen.poll() is not None or epochs(run) > least, f"epoch {least + 1}")
    assert running.popen.poll() is None, running.text()


def interrupt(study: Path, running: Process) -> None:
    """Ends a study by Ctrl-C, and its trial on the way."""
    running.kill(signal.SIGINT)
    assert running.wait() == 130, running.text()
    running.end()
    assert [row["state"] for row in table(study)] == ["stopped"]


def check_counted(study: Path) -> None:
    assert [row["state"] for row in table(study)] == ["complete"]
    counted = summary(study, 0)["counted"]
    assert (counted["batches"], counted["counted"], counted["twice"]) == (BATCHES, BATCHES, 0)
    wait_until_gone(processes_of(study))


def batch_jobs(env: Mapping[str, str]) -> int:
    """Returns how many batch jobs wait or run."""
    said = subprocess.run(
        ["squeue", "-h"], capture_output=True, text=True, check=True, env={**os.environ, **env}
    )
    return len(said.stdout.splitlines())


def test_slurm_trains_nothing_twice(tmp_path: Path) -> None:
    """A task is killed, then Ctrl-C, and at last the command is killed, whose batch job goes on."""
    study = tmp_path / "study"
    (tmp_path / "slurm").mkdir()
    with slurm(tmp_path / "slurm") as engine:
        env = {"SLURM_CONF": engine["SLURM_CONF"]}
        running = tuned(study, "--on", "slurm", **env)
        until_trained(study, running, 2)
        killed = task_of(study)
        os.kill(killed, signal.SIGKILL)
        running.wait_for("batch job 1 has ended as FAILED, see .*; it is started again")
        until_trained(study, running, epochs(study / "trial-0000"))
        interrupt(study, running)
        until(lambda: batch_jobs(env) == 0, "all batch jobs to end")
        running = tuned(study, "--on", "slurm", **env)
        until(lambda: batch_jobs(env) == 1, "the batch job of the second command")
        running.end()
        job = (study / "trial-0000" / "trial.job").read_text()
        assert json.loads(job)["job"] == 3
        running = tuned(study, "--on", "slurm", **env)
        assert running.wait() == 0, running.text()
        running.end()
        assert (study / "trial-0000" / "trial.job").read_text() == job, "the job was taken over"
        check_counted(study)


def test_ray_trains_nothing_twice(tmp_path: Path, ray_engine: str) -> None:
    """A worker of Ray is killed, then Ctrl-C."""
    study = tmp_path / "study"
    said = ("--on", "ray", "--address", ray_engine)
    running = tuned(study, *said)
    until_trained(study, running, 2)
    killed = parent(task_of(study))
    os.kill(killed, signal.SIGKILL)
    running.wait_for("trial 0: its task was lost: .*; it is started again")
    until_trained(study, running, epochs(study / "trial-0000"))
    interrupt(study, running)
    wait_until_gone(processes_of(study))
    running = tuned(study, *said)
    assert running.wait() == 0, running.text()
    running.end()
    check_counted(study)
