"""The supervisor with real processes: small shells, and a coordinator's status served from here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.launch import fleet
from coordinator.launch import process_health as health
from coordinator.launch.restarts import Outcome
from psrpc.core.names import STARTING
from psrpc.files.run_paths import is_starting
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.fakes import listening
from tests.coordinator.launch.fixtures import ENDS, STAYS, TWICE, WAITS, ShellCluster, Status


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[ShellCluster]:
    status = Status()
    with listening(status) as address:
        yield ShellCluster(tmp_path, address, status)


def test_a_job_that_is_done(shells: ShellCluster) -> None:
    shells.coordinator = shells.serving(ENDS)
    shells.members = {"shard-0": STAYS, "worker-a": "echo done > gate"}
    assert shells.run() == Outcome(0)


def test_bad_input_is_shown_as_the_coordinator_said_it(shells: ShellCluster) -> None:
    shells.coordinator = """
        echo '2026-01-01T00:00:00 [info     ] describing role=coordinator'
        echo '{"event": "the same as JSON"}'
        echo 'Traceback (most recent call last):'
        echo '  File "job.py", line 3, in <module>'
        echo 'error: job.py raised ZeroDivisionError: division by zero'
        exit 2"""
    assert shells.run() == Outcome(
        2,
        details=[
            "Traceback (most recent call last):",
            '  File "job.py", line 3, in <module>',
            "error: job.py raised ZeroDivisionError: division by zero",
        ],
    )


def test_a_disk_without_room_at_the_start_is_a_refusal(shells: ShellCluster) -> None:
    """A coordinator that is started again finds it just as full."""
    line = "error PS502: the run directory cannot be used: No space left on device"
    shells.coordinator = f"echo '{line}'; exit 1"
    assert shells.run() == Outcome(1, details=[line])


def test_a_disk_without_room_while_the_job_runs_is_none(shells: ShellCluster) -> None:
    shells.coordinator = TWICE.format(
        first=shells.serving("read x < door; echo 'error PS502: full'; exit 1"),
        second=shells.serving("read x < gate; exit 0"),
    )
    shells.members = {"worker-a": "echo x > door; echo x > gate"}
    shells.fifo("door")
    assert shells.run() == Outcome(0, restarts={"coordinator": 1})


def test_a_failed_job_leaves_the_reason_to_the_summary(shells: ShellCluster) -> None:
    (shells.folder / "summary.json").write_text("{}")
    shells.coordinator = shells.serving(f"{shells.write_summary(phase='failed')}; exit 1")
    shells.members = {"worker-a": WAITS}
    outcome = shells.run()
    assert (outcome.exit_status, outcome.own, outcome.restarts) == (1, False, {})


def test_a_summary_counts_whatever_became_of_its_writer(shells: ShellCluster) -> None:
    shells.coordinator = shells.serving(f"{shells.write_summary(phase='done')}; kill -9 $$")
    shells.members = {"shard-0": WAITS}
    assert shells.run() == Outcome(0)


@pytest.mark.parametrize("end", ["kill -9 $$", "exit 3"])
def test_a_shard_that_dies_is_started_again(shells: ShellCluster, end: str) -> None:
    shells.coordinator = shells.serving(ENDS)
    shells.members = {
        "shard-0": TWICE.format(first=f"echo first; {end}", second="echo second; echo x > gate"),
        "shard-1": f"echo only; {STAYS}",
    }
    outcome = shells.run()
    assert outcome == Outcome(0, restarts={"shard-0": 1})
    (warning,) = [note for note in shells.screen.notes if note.startswith("warning")]
    how = "signal SIGKILL" if "kill" in end else "exit status 3"
    assert warning.startswith("warning: shard-0 (pid ")
    assert warning.endswith(
        f") ended with {how}, see {shells.log('shard-0')}; it is started again, "
        "restart 1 of at most 10"
    )
    assert shells.log("shard-0").read_text() == "first\nsecond\n"
    assert shells.log("shard-1").read_text() == "only\n", "the others keep running"


def test_the_error_with_which_a_process_ended_is_shown(shells: ShellCluster) -> None:
    shells.coordinator = shells.serving(ENDS)
    shells.members = {
        "shard-0": TWICE.format(
            first="echo 'error PS133: another model' >&2; exit 1",
            second=f"echo x > gate; {STAYS}",
        )
    }
    shells.run()
    (warning,) = [note for note in shells.screen.notes if note.startswith("warning")]
    assert warning.endswith(
        f"see {shells.log('shard-0')}: error PS133: another model; it is started again, "
        "restart 1 of at most 10"
    )


def test_a_coordinator_that_dies_is_started_again(shells: ShellCluster) -> None:
    # Of an earlier run; it says nothing of this one's end.
    (shells.folder / "summary.json").write_text('{"phase": "done"}')
    shells.coordinator = TWICE.format(
        first=shells.serving("echo first; kill -9 $$"),
        second=shells.serving("echo second; read x < gate; exit 0"),
    )
    shells.members = {"worker-a": "echo once; echo x > gate"}
    outcome = shells.run()
    assert outcome == Outcome(0, restarts={"coordinator": 1})
    assert shells.log("coordinator").read_text() == "first\nsecond\n"
    assert shells.log("worker-a").read_text() == "once\n"


def test_a_coordinator_that_drains_is_started_again(shells: ShellCluster) -> None:
    shells.status.now.phase = "stopping"
    shells.coordinator = TWICE.format(
        first=shells.serving("read x < door; exit 75"),
        second=shells.serving("read x < gate; exit 0"),
    )
    shells.members = {"worker-a": STAYS}
    door = shells.fifo("door")
    with shells.running() as outcomes:
        shells.screen.wait_for("stopping")
        shells.status.now = pb.GetJobStatusResponse(phase="training")
        door.write_text("x\n")
        shells.screen.wait_for("it is started again")
        shells.gate.write_text("done\n")
    assert outcomes == [Outcome(0, restarts={"coordinator": 1})]


AGAIN: dict[str, object] = {
    "phase": "restarting",
    "reason": "stopped for dense=allreduce",
    "global_step": 20,
}


@pytest.mark.parametrize("end", ["exit 76", "kill -9 $$"])
def test_a_cluster_whose_job_has_other_processes_now_starts_again(
    shells: ShellCluster, end: str
) -> None:
    """Its coordinator says so, or is killed once it has told the others."""
    (shells.folder / "certs").mkdir()
    document = json.dumps({"description": {"dense": "allreduce"}})
    leaves = f"{shells.write_summary(**AGAIN)}; echo x > leave; echo x > go; {end}"
    shells.coordinator = TWICE.format(
        first=shells.serving(f"read x < gate; {leaves}"),
        second=f"echo '{document}' > job.json; {shells.serving(ENDS)}",
    )
    shells.members = {
        "shard-0": "echo shard; read x < leave; exit 130",
        "worker-a": TWICE.replace("been", "worked").format(
            first="echo first; echo x > gate; read x < go; echo left; exit 130",
            second="echo second; echo x > gate; read x < end",
        ),
    }
    for name in ("leave", "go"):
        shells.fifo(name)
    assert shells.run() == Outcome(0), "no restart of a process that failed"
    assert shells.screen.notes == ["dense=allreduce: the cluster starts again from step 20"]
    assert shells.log("shard-0").read_text() == "shard\n"
    assert shells.log("worker-a").read_text().splitlines() == ["first", "left", "second"]


def test_a_cluster_that_cannot_start_again_leaves_the_run(shells: ShellCluster) -> None:
    """Not as one that was refused, whose run directory is removed."""
    shells.coordinator = TWICE.format(
        first=shells.serving(f"{shells.write_summary(**AGAIN)}; exit 76"),
        second="echo 'error: no such data'; exit 2",
    )
    outcome = shells.run()
    assert (outcome.exit_status, outcome.own, outcome.refused) == (2, True, False)
    assert outcome.details == ["error: no such data"]


def test_a_signal_while_the_cluster_ends_to_start_again_ends_it(shells: ShellCluster) -> None:
    shells.coordinator = TWICE.format(
        first=shells.serving(
            f"trap '' INT; {shells.write_summary(**AGAIN)}; echo x > came; read x < door; exit 76"
        ),
        second="echo again; exit 1",
    )
    came, door = shells.fifo("came"), shells.fifo("door")
    with shells.running() as outcomes:
        came.read_text()
        shells.started.stop()
        door.write_text("x\n")
    assert outcomes == [Outcome(130, "stopped by a signal", own=True)]
    assert shells.log("coordinator").read_text() == ""


def test_the_run_is_said_to_be_started_until_its_coordinator_serves(shells: ShellCluster) -> None:
    shells.coordinator = f"echo x > came; read x < door; {shells.serving(ENDS)}"
    shells.members = {"shard-0": f"echo x > came; {STAYS}"}
    came, door = shells.fifo("came"), shells.fifo("door")
    with shells.running() as outcomes:
        came.read_text()
        assert is_starting(shells.folder)
        door.write_text("x\n")
        came.read_text()
        assert not is_starting(shells.folder)
        shells.gate.write_text("done\n")
    assert outcomes == [Outcome(0)]
    assert not (shells.folder / STARTING).exists()


def test_a_coordinator_that_dies_before_it_serves_is_started_again(shells: ShellCluster) -> None:
    again = shells.serving("read line < gate; exit 0")
    shells.coordinator = TWICE.format(first="kill -9 $$", second=again)
    shells.members = {"worker-a": "echo done > gate"}
    assert shells.run() == Outcome(0, restarts={"coordinator": 1})


def test_a_coordinator_that_cannot_go_on_is_bad_input_and_leaves_the_run(
    shells: ShellCluster,
) -> None:
    shells.coordinator = TWICE.format(
        first=shells.serving("kill -9 $$"), second="echo 'error: the job has changed'; exit 2"
    )
    shells.members = {"worker-a": WAITS}
    outcome = shells.run()
    assert (outcome.exit_status, outcome.own) == (2, True)
    assert outcome.reason.endswith("a job cannot go on without its coordinator")
    assert outcome.details == ["error: the job has changed"]


@pytest.mark.slow
def test_a_crash_loop_ends_the_job_with_its_last_words(shells: ShellCluster) -> None:
    shells.members = {"shard-0": "echo 'MemoryError: 3 GB'; exit 9", "worker-a": WAITS}
    outcome = shells.run()
    assert (outcome.exit_status, outcome.own) == (1, True)
    assert outcome.reason.startswith("shard-0 (pid ")
    assert outcome.reason.endswith(
        f"ended with exit status 9, see {shells.log('shard-0')}; it is not started again: a crash "
        "loop, it ended 3 times in a row within 10 s of coming up; a job cannot go on without all "
        "its shards"
    )
    assert outcome.details == ["MemoryError: 3 GB"]
    assert outcome.restarts == {"shard-0": 2}


def test_a_shard_that_dies_for_good_stops_the_coordinator(shells: ShellCluster) -> None:
    shells.coordinator = shells.serving("exec 3<>never; trap 'echo told; exit 130' INT; read x <&3")
    shells.members = {"shard-0": "exit 1"}
    outcome = shells.run(max_restarts=0)
    assert (outcome.exit_status, outcome.own, outcome.restarts) == (1, True, {})
    assert shells.log("coordinator").read_text() == "told\n"


def test_bad_input_of_a_shard_is_not_tried_again(shells: ShellCluster) -> None:
    shells.members = {"shard-0": "echo 'error: no such host'; exit 2"}
    outcome = shells.run()
    assert (outcome.exit_status, outcome.details) == (2, ["error: no such host"])
    assert shells.log("shard-0").read_text() == "error: no such host\n"


def test_the_jobs_end_explains_that_of_a_shard(shells: ShellCluster) -> None:
    shells.status.now.phase = "failed"
    end = shells.write_summary(phase="failed", reason="why")
    shells.coordinator = shells.serving(f"read x < gate; {end}; exit 1")
    shells.members = {"shard-0": "echo x > gate; exit 1"}
    outcome = shells.run()
    assert (outcome.exit_status, outcome.own, outcome.restarts) == (1, False, {})


def test_an_end_is_not_judged_before_the_coordinator_has_answered(shells: ShellCluster) -> None:
    """It may know that the job is over."""
    shells.coordinator = shells.serving("read line < gate; exit 0")
    shells.members = {"shard-0": "echo x > ended; exit 0"}
    ended = shells.fifo("ended")
    shells.status.answers.clear()
    with shells.running() as outcomes:
        ended.read_text()
        shells.gate.write_text("done\n")
        shells.status.answers.set()
    assert outcomes == [Outcome(0)]


@pytest.mark.slow
def test_a_job_that_is_over_goes_on_if_its_coordinator_dies_before_it_is_recorded(
    shells: ShellCluster,
) -> None:
    """All have left by then, and all are needed again."""
    shells.status.now = pb.GetJobStatusResponse(phase="done")
    shells.coordinator = TWICE.format(
        first=shells.serving("read x < door; kill -9 $$"),
        second=f"echo x > again; {shells.serving('read x < gate; exit 0')}",
    )
    shells.members = {"shard-0": "if test -e left; then echo x > gate; fi; touch left"}
    door, again = shells.fifo("door"), shells.fifo("again")
    with shells.running() as outcomes:
        shells.screen.wait_for("done")
        door.write_text("x\n")
        again.read_text()
        shells.status.now = pb.GetJobStatusResponse(phase="training")
    assert outcomes == [Outcome(0, restarts={"coordinator": 1, "shard-0": 1})]


def test_a_worker_that_dies_is_started_again_and_its_work_given_back(shells: ShellCluster) -> None:
    shells.coordinator = shells.serving(ENDS)
    shells.members = {
        "worker-a": TWICE.format(first="echo $$ > pid; read x < hold; kill -9 $$", second=STAYS)
    }
    pid, hold = shells.fifo("pid"), shells.fifo("hold")
    with shells.running() as outcomes:
        workers = [
            pb.WorkerStatus(worker="worker-2", incarnation=6, pid=1, state="active"),
            pb.WorkerStatus(
                worker="worker-3", incarnation=77, pid=int(pid.read_text()), state="active"
            ),
        ]
        shells.status.now = pb.GetJobStatusResponse(phase="training", workers=workers)
        hold.write_text("go\n")
        assert shells.status.has_left.wait(60)
        shells.gate.write_text("done\n")
    assert outcomes == [Outcome(0, restarts={"worker-a": 1})]
    assert shells.status.left[0] == pb.RevokeWorkerRequest(
        worker="worker-3", incarnation=77, reason="ended with signal SIGKILL"
    )
    assert {farewell.worker for farewell in shells.status.left} == {"worker-3"}


@pytest.mark.slow
def test_a_worker_that_is_given_up_is_a_warning_while_others_are_left(shells: ShellCluster) -> None:
    shells.coordinator = shells.serving(ENDS)
    shells.members = {"worker-a": "exit 1", "worker-b": STAYS}
    with shells.running() as outcomes:
        shells.screen.wait_for("it is not started again: a crash loop")
        assert shells.screen.notes[-1].endswith("; 1 left, the job goes on")
        shells.gate.write_text("done\n")
    assert outcomes == [Outcome(0, restarts={"worker-a": 2})]


def test_a_worker_that_will_be_started_again_is_left(shells: ShellCluster) -> None:
    shells.coordinator = shells.serving(ENDS)
    shells.members = {
        "worker-a": "echo x > a; exit 2",
        "worker-b": TWICE.format(first="echo x > b; exit 1", second=STAYS),
    }
    a, b = shells.fifo("a"), shells.fifo("b")
    shells.status.answers.clear()
    with shells.running() as outcomes:
        a.read_text()
        b.read_text()
        shells.status.answers.set()
        shells.screen.wait_for("; 1 left, the job goes on")
        shells.gate.write_text("done\n")
    assert outcomes == [Outcome(0, restarts={"worker-b": 1})]


def test_no_worker_left_ends_the_job(shells: ShellCluster) -> None:
    shells.members = {"worker-a": "echo 'error: no such GPU: 3'; exit 2"}
    outcome = shells.run()
    assert outcome.exit_status == 2
    assert outcome.reason.startswith("worker-a (pid ")
    assert outcome.reason.endswith("no worker is left")
    assert outcome.details == ["error: no such GPU: 3"]


def test_workers_that_leave_by_themselves_are_let_go(shells: ShellCluster) -> None:
    shells.members = {"worker-a": "exit 0", "worker-b": "exit 0"}
    outcome = shells.run()
    assert (outcome.exit_status, outcome.own, outcome.restarts) == (1, True, {})
    assert outcome.reason.startswith("no worker is left: worker-")


@pytest.mark.slow
def test_a_process_that_is_stopped_is_killed_and_replaced(
    shells: ShellCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "HUNG_S", 1.5)
    shells.coordinator = shells.serving("read line < gate; exit 0")
    shells.members = {
        "shard-0": TWICE.format(
            first="exec 9>held; (read x < never) & kill -STOP 0", second="echo x > gate"
        )
    }
    held = shells.fifo("held")
    with shells.running() as outcomes:
        # Its children are gone too: no process has it open for writing.
        assert held.read_text() == ""
    assert outcomes == [Outcome(0, restarts={"shard-0": 1})]
    assert "was stopped for 2 s and was killed" in shells.screen.notes[0]


BUSY = "while :; do :; done"

SLOW_START = """
echo x > came
nice -n 10 "{python}" -c "
import time
while time.process_time() < 0.4:
    pass"
echo x > built; read x < end"""
"""CPU seconds that the machine is in no hurry to give, without a sign of life."""


def silent(shells: ShellCluster) -> None:
    """Shard 0 has registered, and nothing more is heard of it from then on."""
    shells.status.silent_since = time.monotonic()
    shard = pb.ShardStatus(shard=0, state="silent")
    shells.status.now = pb.GetJobStatusResponse(phase="waiting", shards=[shard])


@pytest.mark.slow
def test_a_shard_that_starts_slowly_on_a_busy_machine_is_left_alone(
    shells: ShellCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "HUNG_S", 3.0)
    monkeypatch.setattr(fleet, "SAMPLE_S", 0.1)
    shells.coordinator = shells.serving(ENDS)
    slow = SLOW_START.format(python=sys.executable)
    shells.members = {"shard-0": TWICE.format(first=slow, second="echo x > built; read x < end")}
    came, built = shells.fifo("came"), shells.fifo("built")
    with ExitStack() as busy, shells.running() as outcomes:
        came.read_text()
        silent(shells)
        for _ in range(2 * (os.cpu_count() or 1)):
            loop = busy.enter_context(subprocess.Popen(["/bin/sh", "-c", BUSY]))
            busy.callback(loop.kill)
        built.read_text()
        shard = pb.ShardStatus(shard=0, state="ready")
        shells.status.silent_since = None
        shells.status.now = pb.GetJobStatusResponse(phase="training", shards=[shard])
        shells.screen.wait_for("training")
        shells.gate.write_text("done\n")
    assert outcomes == [Outcome(0)]
    assert shells.screen.notes == []


@pytest.mark.slow
def test_a_shard_that_hangs_while_it_starts_is_replaced_and_its_last_milestone_named(
    shells: ShellCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "HUNG_S", 3.0)
    monkeypatch.setattr(fleet, "SAMPLE_S", 0.1)
    shells.coordinator = shells.serving("read x < gate; exit 0")
    first = f"echo 'builds its engine'; echo x > came; {WAITS}"
    shells.members = {"shard-0": TWICE.format(first=first, second="echo x > gate")}
    came = shells.fifo("came")
    with shells.running() as outcomes:
        came.read_text()
        silent(shells)
    assert outcomes == [Outcome(0, restarts={"shard-0": 1})]
    assert re.search(
        r"shard-0 \(pid \d+\) gave no sign of life for \d+ s, made no progress and used no CPU "
        r'for \d+ s after "builds its engine" and was killed, see ',
        shells.screen.notes[0],
    )


@pytest.mark.slow
def test_a_coordinator_that_does_not_answer_is_killed_and_replaced(
    shells: ShellCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "HUNG_S", 1.5)
    shells.status.answers.clear()
    shells.coordinator = TWICE.format(first=shells.serving(WAITS), second=shells.serving(ENDS))
    shells.members = {"worker-a": STAYS}
    with shells.running() as outcomes:
        shells.screen.wait_for("did not answer for 2 s and was killed")
        shells.status.answers.set()
        shells.gate.write_text("done\n")
    assert outcomes == [Outcome(0, restarts={"coordinator": 1})]


def test_a_signal_stops_the_coordinator_first(shells: ShellCluster) -> None:
    # The coordinator tells the others; here it lets them through their door.
    shells.fifo("door")
    shells.coordinator = shells.serving(
        "exec 3<>never; trap 'echo bye > door; exit 130' INT; read x <&3"
    )
    shells.members = {"worker-a": "echo up; read line < door; echo left; exit 0"}
    supervisor = shells.supervisor()
    shells.screen.when_shown = supervisor.stop
    outcome = supervisor.run()
    assert outcome == Outcome(130, "stopped by a signal")
    assert shells.screen.notes == [
        "stopping: a checkpoint is written (Ctrl-C again to stop at once)"
    ]
    assert shells.log("worker-a").read_text() == "up\nleft\n"


def test_a_signal_when_the_job_is_done_lets_its_coordinator_leave(shells: ShellCluster) -> None:
    shells.status.now = pb.GetJobStatusResponse(phase="done")
    shells.coordinator = shells.serving("trap 'exit 130' INT; read x < gate; exit 0")
    with shells.running() as outcomes:
        shells.screen.wait_for("done")
        shells.started.stop()
        shells.screen.wait_for("stopping: the job is over (Ctrl-C again to stop at once)")
        # Without a reader it would block.
        gate = os.open(shells.gate, os.O_RDWR)
        os.write(gate, b"done\n")
    os.close(gate)
    assert outcomes == [Outcome(0)]


def test_a_signal_before_the_first_step_says_that_there_is_nothing_to_save(
    shells: ShellCluster,
) -> None:
    shells.coordinator = shells.serving("trap 'exit 130' INT; read x < never")
    shells.members = {"worker-a": WAITS}
    supervisor = shells.supervisor()
    supervisor.stop()
    assert supervisor.run().exit_status == 130
    assert shells.screen.notes[0] == (
        "stopping: there is nothing to save yet (Ctrl-C again to stop at once)"
    )


def test_a_second_signal_kills(shells: ShellCluster) -> None:
    shells.coordinator = shells.serving("trap '' INT TERM; read x < never")
    shells.members = {"worker-a": WAITS}
    supervisor = shells.supervisor()

    def stop_twice() -> None:
        supervisor.stop()
        supervisor.stop()

    shells.screen.when_shown = stop_twice
    assert supervisor.run().exit_status == 130
    # It has waited for nothing.
    assert len(shells.screen.notes) == 1
