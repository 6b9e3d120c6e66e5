"""The page of a study makes its figures when a browser asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from coordinator.search.points import Space
from coordinator.search.space import log
from coordinator.search.trials import StudyLimits, StudyMetric, TrialRecord, TrialValue
from coordinator.tune.engine import RunningTrial
from coordinator.tune.page import StudyPage
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse


class Watched:
    """The run of a trial that counts how often its status is read."""

    dashboard = ""
    reads = 0

    @property
    def status(self) -> GetJobStatusResponse:
        self.reads += 1
        return GetJobStatusResponse(epochs=9)


def test_figures_are_made_for_those_that_look(tmp_path: Path) -> None:
    page = StudyPage(
        tmp_path, StudyMetric("max", "accuracy"), StudyLimits(2, 1, 0), Space({"a": log(1, 2)})
    )
    run = Watched()
    trial = RunningTrial(0, 0, {"a": 1.5}, cast(Any, run), cast(Any, None), 0.0)
    records = [TrialRecord(0, "running", {"a": 1.5}, (), None, "", "", None)]
    for _ in range(9):
        page.show(records, [trial])
    assert run.reads == 0
    trial.values = [TrialValue(3, 0.5)]
    [shown] = page.study()["trials"]
    assert run.reads == 1
    assert (shown["phase"], shown["epoch"], shown["epochs"]) == ("running", 3, 9)
