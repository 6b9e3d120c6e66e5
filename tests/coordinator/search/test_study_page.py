"""The content of a study's page."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from coordinator.search.points import Space
from coordinator.search.space import choice, integers, log, log_integers
from coordinator.search.study_page import (
    StudyState,
    TrialProgress,
    axis_document,
    study_document,
    trial_document,
)
from coordinator.search.trials import StudyLimits, StudyMetric, TrialRecord, TrialValue

METRIC = StudyMetric("max", "accuracy")
SPACE = Space({"rate": log(1e-4, 0.1), "kind": choice("a", None)})
POINT = {"rate": 0.01, "kind": None}
DONE = TrialRecord(0, "complete", POINT, (TrialValue(1, 0.5), TrialValue(2, 0.75)), 0.75, "", "", 9)
FAILED = replace(DONE, number=1, phase="failed", values=(), value=None, reason="no\x1b[31m room")
LEFT = replace(DONE, number=2, phase="stopped", value=None, seconds=None)
RUNS = TrialProgress((TrialValue(1, math.nan),), False, 9, 3.5, "http://127.0.0.1:5080/")


def test_a_study_is_told_with_its_trials_and_its_settings() -> None:
    state = StudyState((DONE, FAILED), importance={"kind": 0.25, "rate": 0.75})
    found = study_document(METRIC, StudyLimits(8, 2, 1), SPACE, state)
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "metric": "accuracy",
        "direction": "max",
        "parallel": 2,
        "limit": 8,
        "ended": "",
        "best": 0,
        "axes": [
            {"key": "rate", "low": 1e-4, "high": 0.1, "log": True},
            {"key": "kind", "values": ["a", None]},
        ],
        "trials": [
            {
                "number": 0,
                "phase": "complete",
                "value": 0.75,
                "epoch": 2,
                "epochs": 0,
                "seconds": 9,
                "point": POINT,
                "reason": "",
                "dashboard": "",
            },
            {
                "number": 1,
                "phase": "failed",
                "value": None,
                "epoch": 0,
                "epochs": 0,
                "seconds": 9,
                "point": POINT,
                "reason": "no\N{REPLACEMENT CHARACTER}[31m room",
                "dashboard": "",
            },
        ],
        "importance": [["rate", 0.75], ["kind", 0.25]],
        "importance_trials": 10,
    }


def test_a_trial_that_runs_is_told_by_its_run() -> None:
    record = replace(DONE, phase="running", value=None, seconds=None)
    found = trial_document(record, RUNS, study_ended=False)
    assert found["phase"] == "running"
    assert (found["value"], found["epoch"], found["epochs"]) == (None, 1, 9)
    assert (found["seconds"], found["dashboard"]) == (3.5, "http://127.0.0.1:5080/")
    assert trial_document(record, replace(RUNS, ending=True), False)["phase"] == "ending"


def test_a_trial_that_is_left_waits_until_the_study_has_ended() -> None:
    assert trial_document(LEFT, None, study_ended=False)["phase"] == "waiting"
    assert trial_document(LEFT, None, study_ended=True)["phase"] == "stopped"
    ended = study_document(METRIC, StudyLimits(8, 2, 1), SPACE, StudyState((LEFT,), ended="Ctrl-C"))
    assert (ended["ended"], ended["best"]) == ("Ctrl-C", None)
    assert [each["phase"] for each in ended["trials"]] == ["stopped"]


def test_an_axis_says_whether_it_is_logarithmic() -> None:
    assert axis_document("depth", integers(1, 8)) == {
        "key": "depth",
        "low": 1,
        "high": 8,
        "log": False,
    }
    assert axis_document("width", log_integers(8, 512))["log"]
    assert axis_document("x", choice(math.inf, 1.0))["values"] == ["inf", 1.0]
