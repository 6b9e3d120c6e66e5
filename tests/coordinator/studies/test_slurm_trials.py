"""The states of batch jobs decide whether a trial goes on, is lost, or is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.launchers.slurm import BatchOptions
from coordinator.studies.engine_trials import TrialTask
from coordinator.studies.slurm_trials import (
    BATCH_JOB,
    SCRIPT,
    SlurmEngine,
    SlurmQueue,
    SlurmTask,
    slurm_engine,
)
from coordinator.studies.trial_process import ANSWER, TrialStart, write_wish
from coordinator.tune.options import TuneArguments
from psrpc.core.errors import LaunchFailed


class Slurm:
    """Answers the commands of Slurm as a test says."""

    def __init__(self) -> None:
        self.states = {7: "RUNNING"}
        self.away = False
        self.submitted: list[str] = []

    def run(self, *command: str) -> str:
        if self.away:
            raise LaunchFailed("squeue has not answered for 60 s")
        assert command[0] == "squeue"
        return "".join(f"{job} {state}\n" for job, state in self.states.items())

    def submit(self, path: Path) -> int:
        self.submitted.append(path.read_text())
        return 7


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    played = Slurm()
    monkeypatch.setattr("coordinator.studies.slurm_trials.run_slurm", played.run)
    monkeypatch.setattr("coordinator.studies.slurm_trials.submit", played.submit)
    monkeypatch.setattr("coordinator.studies.slurm_trials.POLL_S", 0.0)
    return played


def started(study: Path, notes: list[str], launch: str = "b") -> SlurmTask:
    start = TrialStart(str(study), 3, {"rate": 0.1}, launch, 2)
    start.run_dir.mkdir(exist_ok=True)
    batch = BatchOptions({"partition": "gpu", "cpus-per-task": "2"})
    engine = SlurmEngine(batch, SlurmQueue())
    made = engine.task(TrialTask(start, "call", ("job.py",), "/some where"), notes.append)
    made.start()
    return made


def test_the_script_has_the_options_and_the_process_of_the_trial(
    tmp_path: Path, slurm: Slurm
) -> None:
    started(tmp_path, [])
    [script] = slurm.submitted
    assert script == (tmp_path / "trial-0003" / SCRIPT).read_text()
    for line in ("#SBATCH --partition=gpu", "#SBATCH --cpus-per-task=2", "#SBATCH --no-requeue"):
        assert f"\n{line}\n" in script
    assert "\n[ -d '/some where' ] && cd '/some where'\nexec " in script
    assert "-m coordinator.studies.trial_process" in script


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED"])
def test_a_job_that_waits_or_runs_has_not_ended(tmp_path: Path, slurm: Slurm, state: str) -> None:
    slurm.states[7] = state
    assert started(tmp_path, []).look() is None


@pytest.mark.parametrize(
    ("state", "log", "how", "then"),
    [
        ("FAILED", True, "batch job 7 has ended as FAILED, see ", "lost"),
        ("NODE_FAIL", False, "batch job 7 has ended as NODE_FAIL, see ", "lost"),
        ("", True, "batch job 7 is gone, see ", "lost"),
        ("CANCELLED", True, "batch job 7 was cancelled", "cancelled"),
        ("FAILED", False, "PS141: the node of its batch job does not see ", "given up"),
    ],
)
def test_a_job_without_an_answer(
    tmp_path: Path, slurm: Slurm, state: str, log: bool, how: str, then: str
) -> None:
    task = started(tmp_path, [])
    slurm.states = {7: state} if state else {}
    if log:
        (tmp_path / "trial-0003" / "slurm-7.log").touch()
    end = task.look()
    assert end is not None
    assert (end.how[: len(how)], end.then) == (how, then)


def test_a_slurm_that_does_not_answer_is_said_once(tmp_path: Path, slurm: Slurm) -> None:
    notes: list[str] = []
    task = started(tmp_path, notes)
    slurm.away = True
    assert [task.look(), task.look()] == [None, None]
    [note] = notes
    assert note.startswith("warning: the states of batch jobs are unknown: squeue has not")


@pytest.mark.parametrize(
    ("case", "taken"),
    [("runs", True), ("answered", True), ("asked to stop", False), ("gone", False)],
)
def test_a_job_of_an_earlier_command_is_taken_over(
    tmp_path: Path, slurm: Slurm, case: str, taken: bool
) -> None:
    started(tmp_path, [], "earlier")
    run_dir = tmp_path / "trial-0003"
    assert json.loads((run_dir / BATCH_JOB).read_text()) == {"job": 7, "launch": "earlier"}
    if case != "runs":
        slurm.states = {}
    if case == "asked to stop":
        slurm.states[7] = "RUNNING"
        write_wish(run_dir, "earlier", "stop")
    if case == "answered":
        answer = {"launch": "earlier", "status": 0, "reason": ""}
        (run_dir / ANSWER).write_text(json.dumps(answer))
    left = SlurmEngine(BatchOptions(), SlurmQueue()).left(run_dir)
    assert left == ("earlier" if taken else "")
    started(tmp_path, [], left or "later")
    assert len(slurm.submitted) == (1 if taken else 2)


def test_more_trials_than_slurm_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "coordinator.launchers.slurm.run_slurm", lambda *_: "all* a 4 (null)\nall* b 4 (null)\n"
    )
    with slurm_engine(TuneArguments(parallel=4, cpus_per_task=2)) as engine:
        assert engine.cores == 2
    said = r"--parallel 3 trials with 3 cores each, and partition 'all' has room for 2 \(8 cores on"
    with (
        pytest.raises(LaunchFailed, match=said),
        slurm_engine(TuneArguments(parallel=3, sbatch=("cpus-per-task=3",))),
    ):
        pass
