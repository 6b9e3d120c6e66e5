"""A study whose processes and whose command are killed again and again."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.cluster import JOBS, Process, processes_of, wait_until_gone
from tests.e2e.test_tune import summary, table

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(1800)]
pytest.importorskip("optuna")

TRIALS, COMMANDS, KILLS = 8, 3, 10
EPOCHS, BATCHES = 60, 60 * 40


def tuned(study: Path) -> Process:
    said = ("--trials", str(TRIALS), "--parallel", "2", "--pruner", "none", "--sampler", "random")
    space = ("--space", "optimizer.learning_rate=uniform(0.01, 0.1)", "--set", f"epochs={EPOCHS}")
    more = ("--max-restarts", "100", "--set", "checkpoint_every=200")
    job = JOBS / "searched.py"
    return Process("tune", "coordinator", "tune", job, "--run-dir", study, *space, *said, *more)


def test_every_trial_is_trained_once_whatever_is_killed(tmp_path: Path) -> None:
    study, draw = tmp_path / "study", random.Random(29)
    for command in range(COMMANDS):
        running = tuned(study)
        running.wait_for(f"trial {2 * command} epoch {draw.randrange(1, EPOCHS // 2)}:")
        before = processes_of(study)
        assert before, "trials are under way"
        running.end()
        wait_until_gone(before)
    done = [int(row["trial"]) for row in table(study) if row["state"] == "complete"]
    before_kills = {trial: summary(study, trial) for trial in done}
    running, killed = tuned(study), 0
    for kill in range(KILLS):
        trial = TRIALS - 2 + kill % 2
        running.wait_for(f"trial {trial} epoch {EPOCHS // 12 * (kill // 2 + 1)}:")
        folder = str(study / f"trial-{trial:04d}")
        with suppress(IndexError, ProcessLookupError):
            os.kill(draw.choice(sorted(processes_of(Path(folder)))), signal.SIGKILL)
            killed += 1
    assert running.wait() == 0, running.text()
    running.end()
    assert killed >= KILLS // 2, "most kills came while the trials ran"
    assert [row["state"] for row in table(study)] == ["complete"] * TRIALS
    for trial in range(TRIALS):
        found = summary(study, trial)
        assert found == before_kills.get(trial, found), "trained twice"
        counted = found["counted"]
        assert (counted["batches"], counted["counted"], counted["twice"]) == (BATCHES, BATCHES, 0)
    assert len(json.loads((study / "best.json").read_text())["settings"]) == 1
    assert not processes_of(study)
