"""How ``coordinator up`` concludes a run, and the table of its result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.launch.commands import UpOptions
from coordinator.launch.conclusion import Earlier, conclude
from coordinator.launch.fleet import stamp
from coordinator.launch.restarts import Outcome
from coordinator.process.result import result_table, show_result
from tests.faults.disks import fill, mounted_disk


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def options(run_dir: str = "runs/x") -> UpOptions:
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    return UpOptions(job="job.py", shards=1, workers=1, run_dir=Path(run_dir))


def write_summary(**values: object) -> None:
    Path("runs/x").mkdir(parents=True, exist_ok=True)
    Path("runs/x/summary.json").write_text(json.dumps(values))


def read_summary() -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(Path("runs/x/summary.json").read_text())
    return summary


def counted(**changes: object) -> dict[str, object]:
    found = {"batches": 2400, "counted": 2400, "twice": 0, "skipped": 0}
    return {**found, "missing_batches": [], "skipped_batches": [], **changes}


def test_a_finished_run_ends_with_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(
        job="mnist_dnn",
        phase="done",
        mode="sync",
        replicas=2,
        shards=2,
        workers=2,
        global_step=1200,
        summed=1180,
        batches=2400,
        examples=120000,
        counted=counted(skipped=1, skipped_batches=["epoch 1 positions 0..49"]),
        wall_s=65.2,
        train_s=41.0,
        batches_per_s=58.53,
        examples_per_s=2926.8,
        eval={"loss": None, "accuracy": 0.9712},
        eval_step=1200,
        checkpoint="checkpoints/step-00001200",
        refused=0,
        skipped=1,
        failed=0,
        mean_staleness=0.0,
        generation=4,
    )
    restarts = {"worker-a": 1, "shard-1": 2}
    assert conclude(Outcome(0, restarts=restarts), options(), earlier=Earlier(), made=True) == 0
    out, err = capsys.readouterr()
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in out.splitlines()]
    assert [cell for cell in cells if cell] == [
        ["mode", "sync, 2 replicas"],
        ["shards", "2"],
        ["workers", "2"],
        ["steps", "1 200"],
        ["rounds with sums", "1 180"],
        ["micro-batches", "2 400"],
        ["examples", "120 000"],
        ["batches counted once", "2 400 of 2 400"],
        ["skipped", "epoch 1 positions 0..49"],
        ["seconds in all", "1:05"],
        ["seconds in training", "41.0 s"],
        ["micro-batches per second", "58.5"],
        ["examples per second", "2927"],
        ["eval.loss", "not finite"],
        ["eval.accuracy", "0.9712"],
        ["refused, skipped, failed", "0, 1, 0"],
        ["generations", "4"],
        ["restarts", "3 (shard-1 2, worker-a 1)"],
        ["checkpoint", "checkpoints/step-00001200"],
        ["run directory", "runs/x"],
    ]
    assert out.splitlines()[-1] == "to use the model: coordinator export runs/x --to model.keras"
    assert "mnist_dnn: done" in out
    assert err == ""
    assert read_summary()["restarts"] == restarts


@pytest.mark.parametrize(
    ("phase", "found", "rows"),
    [
        (
            "done",
            counted(counted=2388, missing_batches=["epoch 1 positions 0..49"]),
            {
                "batches counted once": "2 388 of 2 400",
                "missing": "epoch 1 positions 0..49, 11 more",
            },
        ),
        (
            "failed",
            counted(counted=7, missing_batches=["epoch 1 positions 0..49"]),
            {"batches in the checkpoint": "7 of 2 400"},
        ),
        (
            "done",
            counted(twice=3),
            {"batches counted": "2 400 of 2 400", "twice on some shards, at most": "3"},
        ),
        ("done", None, {}),
    ],
)
def test_the_result_table_says_which_batches_counted(
    phase: str, found: dict[str, object] | None, rows: dict[str, str]
) -> None:
    table = result_table({"phase": phase, "counted": found}, Path("runs/x"))
    labels, values = (list(column.cells) for column in table.columns)
    assert dict(zip(labels, values, strict=True)) == {**rows, "run directory": "runs/x"}


def test_bad_input_of_the_job_is_shown_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = Outcome(2, details=["error: no job file at job.py"])
    assert conclude(outcome, options(), earlier=Earlier(), made=True) == 2
    assert capsys.readouterr() == ("", "error: no job file at job.py\n")
    assert not Path("runs/x").exists()


def test_bad_input_leaves_the_users_own_directory_alone() -> None:
    write_summary(phase="done")
    outcome = Outcome(2, details=["error: runs/x is in use"])
    earlier = Earlier(stamp(Path("runs/x/summary.json")), read_summary())
    assert conclude(outcome, options(), earlier=earlier, made=False) == 2
    assert read_summary() == {"phase": "done"}


def test_a_disk_without_room_at_the_start_is_one_error_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = Outcome(1, details=["error PS502: the run directory cannot be used"])
    assert conclude(outcome, options(), earlier=Earlier(), made=True) == 1
    assert capsys.readouterr() == ("", "error PS502: the run directory cannot be used\n")
    assert not Path("runs/x").exists()


def test_a_job_that_failed_before_it_had_a_summary_gets_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = Outcome(1, "shard-0 is gone", ["MemoryError"], own=True)
    assert conclude(outcome, options(), earlier=Earlier(), made=True) == 1
    assert capsys.readouterr() == ("", "MemoryError\nerror PS601: shard-0 is gone\n")
    assert read_summary() == {
        "job": "job",
        "phase": "failed",
        "reason": "shard-0 is gone",
        "restarts": {},
    }


def test_the_supervisors_reason_replaces_the_coordinators() -> None:
    write_summary(job="j", phase="failed", reason="stopped by signal", examples=5)
    outcome = Outcome(1, "shard-0 is gone", own=True)
    assert conclude(outcome, options(), earlier=Earlier(), made=True) == 1
    assert read_summary() == {
        "job": "j",
        "phase": "failed",
        "reason": "shard-0 is gone",
        "examples": 5,
        "restarts": {},
    }


def test_the_coordinators_reason_stays(capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(job="j", phase="failed", reason="ten NaN")
    outcome = Outcome(1, "the coordinator ended", ["last line of its log"])
    assert conclude(outcome, options(), earlier=Earlier(), made=True) == 1
    assert capsys.readouterr() == ("", "error PS601: job failed: ten NaN\n")
    assert read_summary()["reason"] == "ten NaN"


def test_an_earlier_runs_summary_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(job="j", phase="done", global_step=7)
    earlier = Earlier(stamp(Path("runs/x/summary.json")), read_summary())
    assert conclude(Outcome(0), options(), earlier=earlier, made=False) == 1
    assert capsys.readouterr() == (
        "",
        "error PS601: the coordinator left no summary.json in runs/x\n",
    )


@pytest.mark.parametrize("status", [0, 130])
def test_a_summary_that_still_holds_is_a_result(
    capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """As the coordinator writes it once more, of a run that had nothing left to do."""
    holds = {"job": "j", "phase": "done", "global_step": 7, "restarts": {"shard-0": 2}}
    write_summary(**holds)
    earlier = Earlier(stamp(Path("runs/x/summary.json")), read_summary())
    Path("runs/x/summary.json").rename("runs/x/before.json")
    write_summary(**holds)
    outcome = Outcome(status, "stopped by a signal" if status else "")
    assert conclude(outcome, options(), earlier=earlier, made=False) == status
    out, err = capsys.readouterr()
    assert "j: done" in out
    assert ("nothing was left to train; --set epochs=N" in err) is (status == 0)
    assert read_summary() == holds


def test_a_run_that_had_stopped_early_names_more_patience(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reason = "stopped early at epoch 4: loss did not improve for 2 epochs; best epoch 2"
    holds = {"job": "j", "phase": "done", "reason": reason, "global_step": 7, "restarts": {}}
    write_summary(**holds)
    earlier = Earlier(stamp(Path("runs/x/summary.json")), read_summary())
    Path("runs/x/summary.json").rename("runs/x/before.json")
    write_summary(**holds)
    assert conclude(Outcome(0), options(), earlier=earlier, made=False) == 0
    assert capsys.readouterr().err == (
        f"nothing was left to train; the run {reason}; more patience, --set 'stop_early=min:loss "
        "patience=N', goes on\n"
    )


def test_a_run_that_was_stopped_shows_its_newest_results(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"eval": {"accuracy": 0.9712}, "eval_step": 1200}
    write_summary(job="j", phase="failed", reason="stopped", global_step=1300, **found)
    conclude(Outcome(130, "stopped by a signal"), options(), Earlier(), made=True)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell.strip() for cell in line[1:3]] for line in lines[:3]] == [
        ["steps", "1 300"],
        ["eval.accuracy", "0.9712"],
        ["evaluated at step", "1 200"],
    ]


def test_a_run_that_was_stopped_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(job="j", phase="failed", reason="stopped")
    Path("runs/x/checkpoints/step-00000000").mkdir(parents=True)
    outcome = Outcome(130, "stopped by a signal")
    assert conclude(outcome, options(), earlier=Earlier(), made=True) == 130
    assert capsys.readouterr().err == (
        "stopped by a signal\n"
        "go on with: coordinator up job.py --resume --run-dir runs/x --shards 1 --workers 1\n"
    )
    assert read_summary()["reason"] == "stopped", "the coordinator's own word"


def test_a_signal_after_the_job_was_done_stops_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_summary(job="j", phase="done", global_step=7)
    Path("runs/x/checkpoints/step-00000007").mkdir(parents=True)
    outcome = Outcome(130, "stopped by a signal", ["log"], own=True)
    assert conclude(outcome, options(), Earlier(), made=True) == 0
    out, err = capsys.readouterr()
    assert ("j: done" in out, err) == (True, "")
    assert read_summary()["phase"] == "done"


def test_a_run_whose_directory_is_gone_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    asked = options()
    Path("runs/x").rmdir()
    assert conclude(Outcome(130, "stopped by a signal"), asked, Earlier(), made=True) == 130
    assert capsys.readouterr().err == (
        "error PS504: runs/x/summary.json cannot be written: No such file or directory\n"
        "stopped by a signal\n"
        "run directory runs/x is gone, and nothing is saved; begin anew with: coordinator up "
        "job.py --shards 1 --workers 1\n"
    )


def test_a_run_that_was_stopped_and_not_saved_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/x/checkpoints/step-00000040").mkdir(parents=True)
    for step, lost in ((40, False), (47, True)):
        checkpoint = "checkpoints/step-00000040"
        write_summary(job="j", phase="failed", global_step=step, checkpoint=checkpoint)
        assert conclude(Outcome(130, "stopped by a signal"), options(), Earlier(), made=True) == 130
        said = capsys.readouterr().err
        warning = "step 47 could not be saved; the newest checkpoint is of step 40, and"
        assert (warning in said) == lost


def test_a_run_that_was_stopped_before_it_began_says_so_and_how_to_begin_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = Outcome(130, "stopped by a signal", own=True)
    assert conclude(outcome, options(), earlier=Earlier(), made=True) == 130
    said = (
        "stopped by a signal\n"
        "nothing had been trained, and nothing is saved; begin anew with: "
        "coordinator up job.py{} --shards 1 --workers 1\n"
    )
    assert capsys.readouterr().err == said.format("")
    asked = replace(options(), run_dir_given=True)
    assert conclude(outcome, asked, earlier=Earlier(), made=True) == 130
    assert capsys.readouterr().err == said.format(" --run-dir runs/x")


@pytest.mark.parametrize(
    ("summary", "command"),
    [
        (
            {"phase": "done", "checkpoint": "c", "tables": 2, "growing_tables": ["items"]},
            "coordinator export 'runs/{name}' --tables tables",
        ),
        (
            {"phase": "done", "checkpoint": "c", "tables": 1, "growing_tables": []},
            "coordinator export 'runs/{name}' --to model/",
        ),
        (
            {"phase": "done", "checkpoint": "c"},
            "coordinator export 'runs/{name}' --to model.keras",
        ),
        ({"phase": "failed", "checkpoint": "c"}, ""),
        ({"phase": "done"}, ""),
    ],
)
def test_next_steps_for_a_result(
    summary: dict[str, Any], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, to be copied, however narrow the terminal is."""
    name = "my job " * 20
    show_result(summary, Path("runs") / name)
    out = capsys.readouterr().out
    assert ("to use the model" in out) == bool(command)
    assert command.format(name=name) in out


@pytest.fixture
def full() -> Iterator[Path]:
    """``runs`` on a disk without room, where a run has a checkpoint and logs."""
    with mounted_disk(Path("runs").absolute(), megabytes=1) as disk:
        (disk / "x/checkpoints/step-00000040").mkdir(parents=True)
        (disk / "x/checkpoints/step-00000020").mkdir()
        (disk / "x/logs").mkdir()
        yield disk


REFUSED = (
    "error PS502: runs/x/summary.json cannot be written: No space left on device; make room there; "
    "runs/x keeps checkpoints/step-00000040, {}logs as they are\n"
)


def test_a_full_disk_that_takes_the_summary_of_a_job_that_is_done_is_named(
    full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(full, 0)
    assert conclude(Outcome(0), options(), Earlier(), made=True) == 1
    missing = "error PS601: the coordinator left no summary.json in runs/x\n"
    assert capsys.readouterr().err == REFUSED.format("") + missing


def test_a_full_disk_that_takes_the_reason_of_a_failure_is_named(
    full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(full, 0)
    outcome = Outcome(1, "shard-0 is gone", own=True)
    assert conclude(outcome, options(), Earlier(), made=True) == 1
    said = REFUSED.format("") + "error PS601: shard-0 is gone\n"
    assert capsys.readouterr().err == said


def test_a_full_disk_that_takes_the_restarts_leaves_the_coordinators_summary(
    full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summary(job="j", phase="done", global_step=7)
    fill(full, 0)
    outcome = Outcome(0, restarts={"shard-0": 1})
    assert conclude(outcome, options(), Earlier(), made=True) == 0
    out, err = capsys.readouterr()
    assert "j: done" in out
    assert err == REFUSED.format("summary.json, ")
    assert read_summary() == {"job": "j", "phase": "done", "global_step": 7}
