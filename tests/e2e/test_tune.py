"""Studies as a user runs them: trials are runs of whole clusters."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import (
    JOBS,
    Process,
    ended,
    members,
    processes_of,
    until,
    wait_until_gone,
)

pytestmark = pytest.mark.slow
pytest.importorskip("optuna")

SEARCHED = JOBS / "searched.py"


def table(study: Path) -> list[dict[str, str]]:
    with (study / "study.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def summary(study: Path, trial: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((study / f"trial-{trial:04d}/summary.json").read_text())
    return document


def test_a_grid_is_searched_pruned_and_survives_what_diverges(tmp_path: Path) -> None:
    study = tmp_path / "study"
    said = ("tune", SEARCHED, "--run-dir", study, "--sampler", "grid", "--pruner", "hyperband")
    done = ended("coordinator", *said)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.startswith(f"reading {SEARCHED}, ")
    rows = table(study)
    assert [float(row["optimizer.learning_rate"]) for row in rows] == [0.1, 1e-4, 1e6]
    states = [row["state"] for row in rows]
    assert states == ["complete", "pruned", "failed"]
    for row in rows:
        epochs = int(row["epochs"])
        assert (epochs == 9) == (row["state"] == "complete")
        assert bool(row["reason"]) == (row["state"] != "complete")
    assert "finite" in rows[-1]["reason"]
    pruned = summary(study, states.index("pruned"))
    assert (pruned["phase"], pruned["reason"]) == ("done", "stopped early on request")
    assert pruned["checkpoint"]
    assert pruned["counted"]["counted"] < pruned["counted"]["batches"]
    best = json.loads((study / "best.json").read_text())
    assert best["trial"] == 0
    assert best["set"] == ["optimizer.learning_rate=0.1"]
    assert best["export"] == f"coordinator export {study}/trial-0000 --to model.keras"
    assert best["value"] == min(float(row["loss"]) for row in rows if row["loss"])
    assert f"best model  {best['export']}" in done.stdout
    assert not processes_of(study), "a process outlived the study"


def tuned(study: Path) -> Process:
    said = ("--sampler", "random", "--pruner", "none", "--trials", "2", "--set", "epochs=20")
    space = ("--space", "optimizer.learning_rate=uniform(0.01, 0.1)")
    return Process("tune", "coordinator", "tune", SEARCHED, "--run-dir", study, *space, *said)


def test_a_killed_study_goes_on_and_counts_every_batch_once(tmp_path: Path) -> None:
    study = tmp_path / "study"
    killed = tuned(study)
    killed.wait_for("trial 1 epoch 2:")
    before = processes_of(study)
    assert len(before) >= 3, "the cluster of trial 1"
    killed.end()
    wait_until_gone(before)
    first = summary(study, 0)
    assert [row["state"] for row in table(study)] == ["complete"]
    again = tuned(study)
    again.wait_for("trial 1 goes on")
    until(lambda: bool(members(study, "worker")), "the worker of trial 1")
    os.kill(members(study, "worker")[0], signal.SIGKILL)
    assert again.wait() == 0, again.text()
    again.end()
    assert [row["state"] for row in table(study)] == ["complete"] * 2
    assert summary(study, 0) == first, "trained twice"
    for trial in range(2):
        found = summary(study, trial)
        counted = found["counted"]
        assert (counted["batches"], counted["counted"], counted["twice"]) == (800, 800, 0)
    assert not processes_of(study), "a process outlived the study"
