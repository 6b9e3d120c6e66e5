"""What a study shows: on the terminal, in study.csv and in best.json."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from coordinator.search.trials import (
    StudyLimits,
    StudyMetric,
    TrialRecord,
    TrialValue,
    best_trial,
)
from coordinator.tune.directory import PLACE, StudyDirectory
from coordinator.tune.engine import RunningTrial
from coordinator.tune.results import export_words, study_table, write_results
from coordinator.tune.screen import headline, open_study_screen, time_left_s
from coordinator.tune.trial_run import TrialHistory, TrialRun
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

ACCURACY, LOSS = StudyMetric("max", "accuracy"), StudyMetric("min", "accuracy")
LIMITS = StudyLimits(8, 2, 1)
VALUES = (TrialValue(1, 0.5), TrialValue(3, 0.75))
GOOD = TrialRecord(0, "complete", {"rate": 0.1, "on": True}, VALUES, 0.75, "", "", 10.0)
PRUNED = replace(GOOD, phase="pruned", value=0.5, values=VALUES[:1], reason="after epoch 1")
FAILED = replace(GOOD, phase="failed", value=None, values=(), reason="out of memory")
RECORDS = [
    GOOD,
    replace(GOOD, number=1, value=0.25, seconds=20.0),
    replace(PRUNED, number=2),
    replace(FAILED, number=3),
    replace(FAILED, number=4, phase="running", seconds=None, reason=""),
]


def test_the_table_has_every_trial() -> None:
    trained = {0: 3, 1: 3, 2: 2}
    assert study_table(RECORDS, ACCURACY, ["rate", "on"], trained).splitlines() == [
        "trial,state,accuracy,epochs,seconds,rate,on,reason",
        "0,complete,0.75,3,10.0,0.1,True,",
        "1,complete,0.25,3,20.0,0.1,True,",
        "2,pruned,0.5,2,10.0,0.1,True,after epoch 1",
        "3,failed,,0,10.0,0.1,True,out of memory",
        "4,running,,0,,0.1,True,",
    ]


def test_the_best_trial_is_complete(tmp_path: Path) -> None:
    assert best_trial(RECORDS, ACCURACY) == GOOD
    assert best_trial(RECORDS, LOSS) == RECORDS[1]
    assert best_trial(RECORDS[2:], ACCURACY) is None
    directory = StudyDirectory(tmp_path)
    directory.trial(0).mkdir()
    summary = {"phase": "done", "checkpoint": "checkpoints/step-00000010"}
    (directory.trial(0) / "summary.json").write_text(json.dumps(summary))
    place = {"runs": "/runs/first-ab12cd", "volume": "nfs"}
    (tmp_path / PLACE).write_text(json.dumps(place))
    command = "coordinator export /runs/first-ab12cd/trial-0000 --to model.keras"
    assert export_words(directory, 0) == f"in a pod with the claim nfs: {command}"
    assert export_words(directory, 1) == ""
    (tmp_path / PLACE).unlink()
    directory.trial(2).mkdir()
    (directory.trial(2) / "history.csv").write_text("epoch,val_accuracy\n1,0.5\n2,0.6\n")
    write_results(directory, RECORDS, ACCURACY, ["rate"])
    rows = (tmp_path / "study.csv").read_text().splitlines()
    assert [row.split(",")[3] for row in rows] == ["epochs", "3", "3", "2", "0", "0"]
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["set"] == ["rate=0.1", "on=true"]
    assert best["export"] == f"coordinator export {tmp_path}/trial-0000 --to model.keras"
    write_results(StudyDirectory(tmp_path / "trial-0000"), RECORDS[2:], ACCURACY, ["rate"])
    assert not (tmp_path / "trial-0000" / "best.json").exists()


def test_the_headline_counts() -> None:
    assert headline(RECORDS, ACCURACY, LIMITS) == (
        "4 of 8 trials, 1 running, 1 pruned, 1 failed, best accuracy 0.7500 in trial 0, "
        "about 25.0 s left"
    )
    assert headline([], ACCURACY, LIMITS) == "0 of 8 trials"
    assert time_left_s(RECORDS[:2], StudyLimits(2, 1, 0)) is None


@pytest.mark.parametrize("terminal", [True, False])
def test_the_screen_shows_trials_that_end(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    screen = open_study_screen(console, ACCURACY, LIMITS)
    # On an engine, a trial has no status.
    run = cast(TrialRun, SimpleNamespace(status=GetJobStatusResponse()))
    history = TrialHistory(Path(), "accuracy")
    trial = RunningTrial(4, 0, {"rate": 0.1}, run, history, 0.0, values=VALUES)
    screen.show(RECORDS, [trial])
    screen.evaluated(4, TrialValue(1, 0.5))
    screen.ended(RECORDS[3])
    before = out.tell()
    screen.close(RECORDS)
    stays = out.getvalue()[before:]
    assert bool(re.search(r"0 +. complete .* 0\.75", stays)) is terminal
    assert "trial 3 is failed: out of memory" in out.getvalue()
    assert "4 of 8 trials, 1 running" in out.getvalue()
    assert ("trial 4 epoch 1: accuracy 0.5000" in out.getvalue()) is not terminal
    assert bool(re.search(r"4 +. trains +. 3 +. 0\.75", out.getvalue())) is terminal
