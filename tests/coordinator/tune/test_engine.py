"""The engine of a study with Optuna's own storage, and runs that a test plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.search.points import Point, Space
from coordinator.search.space import choice, integers, log
from coordinator.search.trials import (
    StudyLimits,
    StudyMetric,
    TrialPhase,
    TrialRecord,
    TrialValue,
)
from coordinator.tune.engine import RunningTrial, StudyEngine
from coordinator.tune.options import Pruner, Sampler
from coordinator.tune.optuna_study import OptunaStudy, StudyRules
from coordinator.tune.trial_run import RunEnd, TrialRun
from psrpc.ops.exit_status import DONE, FAILED, INTERRUPTED
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

SPACE = Space({"rate": log(1e-4, 0.1), "depth": integers(1, 9), "kind": choice("a", None)})
EPOCHS = 9
HEADER = "epoch,val_loss,val_accuracy\n"


def rules(sampler: Sampler = "random", pruner: Pruner = "none", space: Space = SPACE) -> StudyRules:
    return StudyRules(space, sampler, pruner, "max", 0, EPOCHS)


def opened(path: Path, said: StudyRules) -> OptunaStudy:
    pytest.importorskip("optuna")
    return OptunaStudy(path / "journal.log", "job", said)


@dataclass
class Screen:
    """Keeps what it is told."""

    lines: list[str] = field(default_factory=list)

    def begun(self, trial: RunningTrial, went_on: bool) -> None:
        self.lines.append(f"{trial.number} {'goes on' if went_on else 'begins'} in {trial.slot}")

    def evaluated(self, number: int, value: TrialValue) -> None:
        pass

    def ended(self, record: TrialRecord) -> None:
        self.lines.append(f"{record.number} {record.phase} {record.reason}".strip())

    def show(self, records: Sequence[TrialRecord], running: Sequence[RunningTrial]) -> None:
        pass

    def note(self, line: str) -> None:
        self.lines.append(line)

    def close(self, records: Sequence[TrialRecord]) -> None:
        pass


class PlayedRun:
    """A run whose evaluations come one with each look, until it ends or is stopped."""

    status = GetJobStatusResponse()

    def __init__(self, history: Path, values: Sequence[str], end: RunEnd) -> None:
        self._history = history
        self._rows = [f"{epoch},0.5,{value}" for epoch, value in enumerate(values, 1)]
        self._end = end
        self._shown = 0
        self.started = self.stopped = self.pruned = False

    def start(self) -> None:
        self.started = True

    def stop(self) -> None:
        self.stopped = True

    def end_early(self) -> None:
        self.pruned = True

    def look(self) -> RunEnd | None:
        if self.pruned:
            return RunEnd(DONE, "")
        if self.stopped:
            return RunEnd(INTERRUPTED, "stopped by a signal")
        if self._shown == len(self._rows):
            return self._end
        self._shown += 1
        other = self._history.with_name("next")
        other.write_text(HEADER + "\n".join(self._rows[: self._shown]) + "\n")
        other.replace(self._history)
        return None


class Played:
    """A study whose trials do what a test says, by number; others reach 0.5."""

    def __init__(self, path: Path, study: OptunaStudy, **options: Any) -> None:
        self.path = path
        self.screen = Screen()
        self.runs: dict[int, PlayedRun] = {}
        self.values: Mapping[int, Sequence[str]] = {}
        self.ends: Mapping[int, RunEnd] = {}
        self.points: dict[int, Point] = {}
        self.tables: list[int] = []
        self.phases: list[TrialPhase] = []
        limits = StudyLimits(
            options.pop("trials", 3), options.pop("parallel", 1), options.pop("max_failures", 0)
        )
        self.engine = StudyEngine(
            study,
            limits,
            StudyMetric("max", "accuracy"),
            self._launch,
            self.screen,
            self._changed,
            **options,
        )

    def _changed(self, records: Sequence[TrialRecord]) -> None:
        self.tables.append(len(records))
        self.phases = [each.phase for each in records]

    def _launch(self, number: int, point: Point, slot: int) -> tuple[TrialRun, Path]:
        run_dir = self.path / f"trial-{number}"
        run_dir.mkdir(exist_ok=True)
        values = self.values.get(number, ["0.5"] * EPOCHS)
        end = self.ends.get(number, RunEnd(DONE, ""))
        self.runs[number] = run = PlayedRun(run_dir / "history.csv", values, end)
        self.points[number] = point
        return cast(TrialRun, run), run_dir


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.tune.engine.POLL_S", 0.0)


@pytest.mark.slow  # imports Optuna, with its own samplers
def test_a_study_makes_its_trials_and_the_same_one_makes_the_same_points(tmp_path: Path) -> None:
    points = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        study = opened(tmp_path / name, rules())
        played = Played(tmp_path / name, study)
        played.ends = {1: RunEnd(FAILED, "out of memory\x07")}
        played.engine._limits = StudyLimits(3, 1, 1)
        assert played.engine.run() == (0, "3 trials made")
        phases = [(each.phase, each.value, each.reason) for each in study.records()]
        assert phases[0] == phases[2] == ("complete", 0.5, "")
        assert phases[1][0] == "failed"
        assert phases[1][2].startswith("out of memory")
        assert "\x07" not in phases[1][2]
        assert played.tables[-1] == 3
        points.append(played.points)
        assert played.points == {n: SPACE.random_point(0, n) for n in range(3)}
    assert points[0] == points[1]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_study_that_goes_on_finishes_what_was_under_way_first(
    tmp_path: Path, sampler: Sampler
) -> None:
    whole = opened(tmp_path, rules(sampler))
    asked = whole.ask()
    # A second trial was asked for, and its point chosen in part, when the process was killed.
    (tmp_path / "half").mkdir()
    journal = (tmp_path / "journal.log").read_text().splitlines(keepends=True)
    (tmp_path / "half" / "journal.log").write_text("".join(journal[:-1]))
    study = opened(tmp_path / "half", rules(sampler))
    [left] = study.records()
    assert left.phase == "running"
    assert len(left.point) == 2
    played = Played(tmp_path / "half", study)
    assert played.engine.run()[0] == 0
    assert played.screen.lines[0] == "0 goes on in 0"
    assert played.screen.lines[1:] == [
        "0 complete", "1 begins in 0", "1 complete", "2 begins in 0", "2 complete",
    ]  # fmt: skip
    assert {k: v for k, v in played.points[0].items() if k in left.point} == left.point
    assert played.points[0] == asked.point
    # Once more, and nothing is left to do.
    again = Played(tmp_path / "half", opened(tmp_path / "half", rules(sampler)))
    assert again.engine.run() == (0, "3 trials made")
    assert not again.runs


@pytest.mark.slow
def test_what_diverges_fails_and_a_bad_trial_is_pruned(tmp_path: Path) -> None:
    study = opened(tmp_path, rules(pruner="median"))
    played = Played(tmp_path, study, trials=8, max_failures=1)
    played.values = {6: ["0.1", "0.1", "0.1"], 7: ["0.6", "nan", "0.7"]}
    assert played.engine.run()[0] == 0
    six, seven = study.records()[6:]
    assert (six.phase, six.reason) == ("pruned", "after epoch 1")
    assert seven.phase == "failed"
    assert seven.reason == "it has diverged: accuracy or loss is not finite after epoch 2"
    assert played.runs[6].pruned
    assert played.runs[7].stopped


@pytest.mark.slow
def test_a_verdict_outlives_the_command(tmp_path: Path) -> None:
    study = opened(tmp_path, rules())
    study.ask()
    study.report(0, TrialValue(1, 0.1))
    study.give_verdict(0, "pruned", "after epoch 1")
    played = Played(tmp_path, opened(tmp_path, rules()), trials=1)
    assert played.engine.run() == (1, "1 trial made, and none is complete; study.csv says why")
    assert played.screen.lines == ["0 pruned after epoch 1"]
    assert not played.runs[0].started


@pytest.mark.slow
def test_failures_end_the_study_and_leave_the_others_under_way(tmp_path: Path) -> None:
    study = opened(tmp_path, rules())
    played = Played(tmp_path, study, trials=4, parallel=2)
    played.values = {0: ["0.1"], 1: ["0.1"] * 1000}
    played.ends = {0: RunEnd(FAILED, "no room")}
    status, reason = played.engine.run()
    assert status == 1
    assert reason.startswith("1 trial has failed; --max-failures is 0")
    assert [each.phase for each in study.records()] == ["failed", "running"]
    assert played.runs[1].stopped
    assert played.phases == ["failed", "stopped"]
    assert "1 begins in 1" in played.screen.lines
    assert "waiting for 1 trial to save; Ctrl-C again ends at once" in played.screen.lines


@pytest.mark.slow
@pytest.mark.parametrize("how", ["timeout", "stop"])
def test_time_and_ctrl_c_leave_trials_under_way(tmp_path: Path, how: str) -> None:
    study = opened(tmp_path, rules())
    played = Played(tmp_path, study, timeout_s=0.0 if how == "timeout" else None)
    if how == "stop":
        played.ends = {0: RunEnd(INTERRUPTED, "stopped by a signal")}
    status, reason = played.engine.run()
    assert "the same command goes on with the study" in reason
    if how == "timeout":
        assert (status, study.records()) == (0, [])
    else:
        assert status == INTERRUPTED
        assert [each.phase for each in study.records()] == ["running"]
        assert played.phases == ["stopped"]


@pytest.mark.slow
def test_the_time_of_a_trial_has_no_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("coordinator.tune.engine.time.monotonic", lambda: now)
    stopped = Played(tmp_path, opened(tmp_path, rules()), trials=1)

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    stopped.ends = {0: RunEnd(INTERRUPTED, "stopped by a signal")}
    monkeypatch.setattr(PlayedRun, "start", lambda _run: later(7.0))
    stopped.engine.run()
    later(1000.0)
    study = opened(tmp_path, rules())
    Played(tmp_path, study, trials=1).engine.run()
    assert [each.seconds for each in study.records()] == [14.0]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["grid", "zip"])
def test_points_of_a_grid_and_of_pairs_come_in_order(tmp_path: Path, sampler: Sampler) -> None:
    space = Space({"rate": choice(0.1, 0.2), "drop": choice(0.45, 0.7)})
    made = rules(sampler, space=space)
    study = opened(tmp_path, made)
    count = 4 if sampler == "grid" else 2
    assert [study.ask().point for _ in range(count)] == [made.point(n) for n in range(count)]


@pytest.mark.slow
def test_a_run_without_evaluation_fails(tmp_path: Path) -> None:
    study = opened(tmp_path, rules())
    played = Played(tmp_path, study, trials=1)
    played.values = {0: []}
    played.engine.run()
    assert study.records()[0].reason == "its run has no evaluation with accuracy"
