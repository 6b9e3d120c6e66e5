"""Tasks of trials, and the files by which a study and its trials speak."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coordinator.launchers.spark_job import MemberEnded
from coordinator.tune.spark_trials import MARK, TrialTask
from coordinator.tune.trial_process import (
    ANSWER,
    TrialStart,
    read_wish,
    trial_answer,
    tune_arguments,
    write_wish,
)


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
    """Its task succeeds, so Spark does not train it again."""
    assert list(task(tmp_path, answering(tmp_path, "b"))(0, ())) == [(1, "diverged")]


def test_a_process_without_an_answer_fails_its_task(tmp_path: Path) -> None:
    with pytest.raises(MemberEnded, match=r"^trial 3 on .* ended with status 7$"):
        list(task(tmp_path, f"{answering(tmp_path, 'a')}; raise SystemExit(7)")(0, ()))


def test_an_executor_without_the_directory_says_so(tmp_path: Path) -> None:
    blind = task(tmp_path)
    (tmp_path / MARK).write_text("another call")
    with pytest.raises(MemberEnded, match=r"^PS141: .* does not see .* share$"):
        list(blind(0, ()))


def test_a_trial_reads_the_options_of_its_study() -> None:
    args, options = tune_arguments(["job.py", "--set=epochs=2", "--parallel=3", "--no-warm-start"])
    assert args.job == "job.py"
    assert (options.overrides, options.parallel, options.warm_start) == (("epochs=2",), 3, False)
