"""A study whose trials are tasks of an engine, as its tests run it."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cluster import JOBS, Process, command, processes_of
from tests.e2e.test_tune import summary, table
from tests.launchers.test_slurm import epochs

TRIALS, EPOCHS = 2, 40
BATCHES = EPOCHS * 40


def tuned(study: Path, *more: str, **env: str) -> Process:
    """Starts the study, or goes on with it."""
    said = ("--trials", str(TRIALS), "--parallel", "2", "--pruner", "none", "--sampler", "random")
    space = ("--space", "optimizer.learning_rate=uniform(0.01, 0.1)", "--set", f"epochs={EPOCHS}")
    more = (*said, *space, "--set", "checkpoint_every=100", "--no-dashboard", *more)
    job = JOBS / "searched.py"
    words: tuple[str | Path, ...] = ("tune", job, "--run-dir", study, *more)
    # A fork has a Popen of the tests, from which Ray cannot derive its own.
    line = command("coordinator", *words) if "ray" in more else ()
    return Process("tune", "coordinator", *words, line=line, **env)


def trial(study: Path, number: int) -> Path:
    """Returns the run directory of a trial."""
    return study / f"trial-{number:04d}"


def task_of(study: Path, number: int) -> int:
    """Returns the process of a trial's task."""
    words = f'"number": {number}'.encode()
    [found] = [
        pid
        for pid in processes_of(study)
        if b"trial_process" in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and words in line
    ]
    return found


def check_counted(study: Path) -> None:
    """Checks that every trial is complete, and each of its batches counted once."""
    assert [row["state"] for row in table(study)] == ["complete"] * TRIALS
    for number in range(TRIALS):
        counted = summary(study, number)["counted"]
        assert (counted["batches"], counted["counted"], counted["twice"]) == (BATCHES, BATCHES, 0)


__all__ = ["check_counted", "epochs", "task_of", "trial", "tuned"]
