"""Tasks of trials, and the files by which a study and its trials speak."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coordinator.launchers.task_process import MemberEnded
from coordinator.studies.engine_trials import LOSSES, MARK, EngineTrial, TaskEnd, TrialTask
from coordinator.studies.trial_process import (
    ANSWER,
    TrialStart,
    read_wish,
    trial_answer,
    write_wish,
)
from coordinator.tune.options import TuneArguments, arguments_of, tune_arguments
from coordinator.tune.trial_run import RunEnd
from psrpc.ops.exit_status import DONE, FAILED, INTERRUPTED


class Played(TrialStart):
    """A trial whose process runs a line of Python."""

    line = ""

    def command(self, _arguments: object) -> list[str]:
        return [sys.executable, "-S", "-c", self.line]


def task(study: Path, line: str = "") -> TrialTask:
    start = Played(str(study), 3, {"rate": 0.1}, "b", 1)
    object.__setattr__(start, "line", line)
    (study / "trial-0003").mkdir(exist_ok=True)
    (study / MARK).write_text("call")
    return TrialTask(start, "call", ("job.py",), str(study))


def answering(study: Path, launch: str) -> str:
    text = f'{{"launch": "{launch}", "status": 1, "reason": "diverged"}}'
    return f"open({str(study / 'trial-0003' / ANSWER)!r}, 'w').write({text!r})"


def test_a_request_of_another_start_means_nothing(tmp_path: Path) -> None:
    assert read_wish(tmp_path, "a") == ""
    write_wish(tmp_path, "a", "end early")
    assert read_wish(tmp_path, "a") == "end early"
    assert read_wish(tmp_path, "b") == ""
    write_wish(tmp_path, "a", "stop")
    assert read_wish(tmp_path, "a") == "stop"


def test_half_an_answer_is_none(tmp_path: Path) -> None:
    (tmp_path / ANSWER).write_text('{"launch": "a", "sta')
    assert trial_answer(tmp_path, "a") is None


def test_a_trial_that_fails_by_itself_is_an_answer(tmp_path: Path) -> None:
    """Its task succeeds, so no engine trains it again."""
    task(tmp_path, answering(tmp_path, "b")).run()
    assert trial_answer(tmp_path / "trial-0003", "b") == (1, "diverged")


def test_a_process_without_an_answer_fails_its_task(tmp_path: Path) -> None:
    with pytest.raises(MemberEnded, match=r"^trial 3 on .* ended with status 7$"):
        task(tmp_path, f"{answering(tmp_path, 'a')}; raise SystemExit(7)").run()


def test_a_machine_without_the_directory_says_so(tmp_path: Path) -> None:
    blind = task(tmp_path)
    (tmp_path / MARK).write_text("another call")
    with pytest.raises(MemberEnded, match=r"^PS141: .* does not see .* share$"):
        blind.run()


def test_a_trial_reads_the_options_of_its_study() -> None:
    args, options = tune_arguments(["job.py", "--set=epochs=2", "--parallel=3", "--no-warm-start"])
    assert args.job == "job.py"
    assert (options.overrides, options.parallel, options.warm_start) == (("epochs=2",), 3, False)


def test_a_trial_on_another_machine_has_the_options_of_the_study() -> None:
    """Those that hold for each trial: the space and the engine are the study's alone."""
    options = TuneArguments(
        parallel=3, on="slurm", shm=False, certs=Path("c"), overrides=("epochs=2", "mode=sync")
    )
    said = arguments_of(options)
    assert said == ["--set=epochs=2", "--set=mode=sync", "--no-shm", f"--certs={Path.cwd()}/c"]
    assert tune_arguments(["job.py", *said])[1].overrides == options.overrides


@dataclass
class PlayedTask:
    """A task that ends as a test says."""

    ends: list[TaskEnd] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.calls.append("start")

    def withdraw(self) -> None:
        self.calls.append("withdraw")

    def cancel(self) -> None:
        self.calls.append("cancel")

    def look(self) -> TaskEnd | None:
        return self.ends.pop(0) if self.ends else None


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineTrial, PlayedTask, Path]:
    monkeypatch.setattr("coordinator.studies.engine_trials.SHARED_S", 0.0)
    start, played = TrialStart(str(tmp_path), 3, {"rate": 0.1}, "b", 1), PlayedTask()
    start.run_dir.mkdir()
    made = EngineTrial(played, start, lambda line: (tmp_path / "notes").write_text(line))
    made.start()
    return made, played, start.run_dir


Trial = tuple[EngineTrial, PlayedTask, Path]


def test_lost_tasks_are_started_again_as_long_as_the_trial_gets_on(trial: Trial) -> None:
    made, played, run_dir = trial
    for epoch in range(LOSSES):
        (run_dir / "history.csv").write_text("x" * epoch)
        played.ends = [TaskEnd("the node is gone")]
        assert made.look() is None
    assert played.calls == ["start"] * (LOSSES + 1)
    notes = (run_dir.parent / "notes").read_text()
    assert notes == "trial 3: the node is gone; it is started again"
    played.ends = [TaskEnd("the node is gone")] * LOSSES
    ends = [made.look() for _ in range(LOSSES - 1)]
    assert ends[:-1] == [None] * (LOSSES - 2)
    said = f"{LOSSES} tasks in a row without an evaluation, at last: the node is gone"
    assert ends[-1] == RunEnd(FAILED, said)


def test_an_answer_counts_however_the_task_has_ended(trial: Trial) -> None:
    made, played, run_dir = trial
    answer = {"launch": "b", "status": 1, "reason": "diverged"}
    (run_dir / ANSWER).write_text(json.dumps(answer))
    played.ends = [TaskEnd("the node is gone")]
    assert made.look() == RunEnd(FAILED, "diverged")


def test_a_late_answer_is_awaited(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    made, played, _ = trial
    monkeypatch.setattr("coordinator.studies.engine_trials.SHARED_S", 1000.0)
    played.ends = [TaskEnd("no answer")] * 9
    assert made.look() is None
    assert played.calls == ["start"]


@pytest.mark.parametrize("then", ["cancelled", "given up"])
def test_what_an_engine_gives_up_is_not_started_again(trial: Trial, then: Any) -> None:
    made, played, _ = trial
    played.ends = [TaskEnd("so be it", then)]
    assert made.look() == RunEnd(INTERRUPTED if then == "cancelled" else FAILED, "so be it")
    assert played.calls == ["start"]


def test_a_stop_withdraws_what_has_not_begun_and_a_second_one_kills(trial: Trial) -> None:
    made, played, run_dir = trial
    made.stop()
    assert read_wish(run_dir, "b") == "stop"
    made.stop()
    assert played.calls == ["start", "withdraw", "cancel"]
    played.ends = [TaskEnd("killed")]
    assert made.look() == RunEnd(INTERRUPTED, "killed")


def test_a_trial_that_is_done_already_gets_no_task(tmp_path: Path) -> None:
    start, played = TrialStart(str(tmp_path), 3, {"rate": 0.1}, "b", 1), PlayedTask()
    start.run_dir.mkdir()
    (start.run_dir / "summary.json").write_text('{"phase": "done"}')
    made = EngineTrial(played, start, str)
    made.start()
    assert made.look() == RunEnd(DONE, "")
    assert not played.calls
