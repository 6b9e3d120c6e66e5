"""The supervisor with real processes: small shells, and a coordinator's status served from here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.children import Exited
from coordinator.commands import Cluster, Command
from coordinator.supervisor import Outcome, Supervisor, Verdict, judge, plain_output
from psrpc.channel import bind, make_server
from psrpc.v1.coordinator_pb2 import GetJobStatusRequest, GetJobStatusResponse, WorkerStatus
from psrpc.v1.coordinator_pb2_grpc import (
    CoordinatorServicer,
    add_CoordinatorServicer_to_server,
)


class Status(CoordinatorServicer):
    """Answers GetJobStatus with whatever ``now`` is."""

    def __init__(self) -> None:
        self.now = GetJobStatusResponse(job="job", phase="training")

    def GetJobStatus(  # noqa: N802
        self, request: GetJobStatusRequest, context: Any
    ) -> GetJobStatusResponse:
        return self.now


class Notes:
    """A screen that remembers, and lets a test wait for a word."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.shown: list[str] = []
        self.closed = False
        self._changed = threading.Condition()

    def show(self, status: GetJobStatusResponse) -> None:
        self.shown.append(status.phase)

    def note(self, line: str) -> None:
        with self._changed:
            self.notes.append(line)
            self._changed.notify_all()

    def close(self) -> None:
        self.closed = True

    def wait_for(self, word: str) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(word in line for line in self.notes), timeout=60
            )


class House:
    """A cluster of shells in a directory; FIFOs are the doors that hold them."""

    def __init__(self, folder: Path, address: str, status: Status) -> None:
        self.folder = folder
        self.address = address
        self.status = status
        self.screen = Notes()
        self.members: dict[str, str] = {}
        self.coordinator = self.serving("read line < never; exit 0")
        os.mkfifo(folder / "never")

    def serving(self, script: str) -> str:
        return f"echo {self.address} > address.tmp; mv address.tmp address; {script}"

    def supervisor(self) -> Supervisor:
        def command(script: str) -> Command:
            return Command(["/bin/sh", "-c", f"cd {self.folder}; {script}"], os.environ)

        def members(address: str) -> dict[str, Command]:
            assert address == self.address
            return {name: command(script) for name, script in self.members.items()}

        return Supervisor(Cluster(command(self.coordinator), members), self.folder, self.screen)

    def run(self) -> Outcome:
        outcome = self.supervisor().run()
        assert self.screen.closed
        return outcome

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    server = make_server(threads=2)
    status = Status()
    add_CoordinatorServicer_to_server(status, server)  # type: ignore[no-untyped-call]
    port = bind(server, "127.0.0.1:0")
    server.start()
    yield House(tmp_path, f"127.0.0.1:{port}", status)
    server.stop(grace=None).wait()


def test_a_job_that_is_done(house: House) -> None:
    os.mkfifo(house.folder / "gate")
    house.coordinator = house.serving("read line < gate; exit 0")
    house.members = {"shard-0": "exit 0", "worker-a": "echo done > gate"}
    assert house.run() == Outcome(0)


def test_bad_input_is_shown_as_the_coordinator_said_it(house: House) -> None:
    house.coordinator = """
        echo '2026-01-01T00:00:00 [info     ] describing role=coordinator'
        echo '{"event": "the same as JSON"}'
        echo 'Traceback (most recent call last):'
        echo '  File "job.py", line 3, in <module>'
        echo 'error: job.py raised ZeroDivisionError: division by zero'
        exit 2"""
    assert house.run() == Outcome(
        2,
        details=[
            "Traceback (most recent call last):",
            '  File "job.py", line 3, in <module>',
            "error: job.py raised ZeroDivisionError: division by zero",
        ],
    )


def test_a_failed_job_leaves_the_reason_to_the_summary(house: House) -> None:
    house.coordinator = house.serving("exit 1")
    house.members = {"worker-a": "read line < never"}
    outcome = house.run()
    assert (outcome.exit_status, outcome.own) == (1, False)


def test_a_coordinator_that_dies_is_named_with_the_end_of_its_log(house: House) -> None:
    house.coordinator = house.serving("echo last words; kill -9 $$")
    house.members = {"shard-0": "read line < never"}
    outcome = house.run()
    assert (outcome.exit_status, outcome.own) == (1, False)
    assert outcome.reason.startswith("the coordinator (pid ")
    assert outcome.reason.endswith(f"ended with signal SIGKILL, see {house.log('coordinator')}")
    assert outcome.details == ["last words"]


@pytest.mark.slow
def test_a_shard_that_dies_ends_the_job(house: House) -> None:
    house.coordinator = house.serving("exec 3<>never; trap 'echo told; exit 130' TERM; read x <&3")
    house.members = {
        "shard-0": "echo 'MemoryError: 3 GB'; exit 9",
        "worker-a": "read line < never",
    }
    outcome = house.run()
    assert (outcome.exit_status, outcome.own) == (1, True)
    assert outcome.reason.startswith("shard-0 (pid ")
    assert f"ended with exit status 9, see {house.log('shard-0')}" in outcome.reason
    assert outcome.details == ["MemoryError: 3 GB"]
    assert house.log("coordinator").read_text() == "told\n"


@pytest.mark.slow
def test_the_coordinators_end_comes_before_a_shards(house: House) -> None:
    os.mkfifo(house.folder / "gate")
    house.coordinator = house.serving("read x < gate; echo why; exit 1")
    house.members = {"shard-0": "echo x > gate; exit 1"}
    outcome = house.run()
    assert (outcome.own, outcome.details) == (False, ["why"])


def test_a_coordinator_that_serves_no_more_may_take_its_time(house: House) -> None:
    os.mkfifo(house.folder / "gate")
    house.address = "127.0.0.1:1"  # Nobody listens there.
    house.coordinator = house.serving("read line < gate; exit 0")
    house.members = {"shard-0": "exit 0"}
    supervisor = house.supervisor()
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(supervisor.run()))
    thread.start()
    house.screen.wait_for("waiting for the coordinator to end")
    (house.folder / "gate").write_text("done\n")
    thread.join()
    assert outcomes == [Outcome(0)]


def test_a_worker_that_dies_is_a_warning_while_others_are_left(house: House) -> None:
    os.mkfifo(house.folder / "gate")
    house.coordinator = house.serving("read line < gate; exit 0")
    house.members = {"worker-a": "kill -9 $$", "worker-b": "read line < never"}
    supervisor = house.supervisor()
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(supervisor.run()))
    thread.start()
    house.screen.wait_for("warning: worker-a (pid ")
    assert "1 left, the job goes on" in house.screen.notes[-1]
    (house.folder / "gate").write_text("done\n")
    # The other worker never leaves by itself: a second request kills it.
    supervisor.stop()
    supervisor.stop()
    thread.join()
    assert outcomes[0].exit_status in {0, 130}


@pytest.mark.slow
def test_no_worker_left_ends_the_job(house: House) -> None:
    house.coordinator = house.serving("exec 3<>never; trap 'exit 130' TERM; read x <&3")
    house.members = {"worker-a": "echo 'error: no such GPU: 3'; exit 2"}
    outcome = house.run()
    assert outcome.exit_status == 2
    assert outcome.reason.startswith("no worker is left: worker-a (pid ")
    assert outcome.details == ["error: no such GPU: 3"]


def test_a_signal_stops_the_coordinator_first(house: House) -> None:
    # The coordinator tells the others; here it lets them through their door.
    os.mkfifo(house.folder / "door")
    house.coordinator = house.serving(
        "exec 3<>never; trap 'echo bye > door; exit 130' TERM; read x <&3"
    )
    house.members = {"worker-a": "echo up; read line < door; echo left; exit 0"}
    supervisor = house.supervisor()
    house.status.now.phase = "waiting"
    show = house.screen.show

    def show_and_stop(status: GetJobStatusResponse) -> None:
        show(status)
        if len(house.screen.shown) == 1:
            supervisor.stop()

    house.screen.show = show_and_stop  # type: ignore[method-assign]
    outcome = supervisor.run()
    assert (outcome.exit_status, outcome.own) == (130, True)
    assert house.log("worker-a").read_text() == "up\nleft\n"


def test_an_address_of_an_earlier_run_is_not_believed(house: House) -> None:
    (house.folder / "address").write_text("127.0.0.1:1\n")
    os.mkfifo(house.folder / "gate")
    house.coordinator = house.serving("read line < gate; exit 0")
    house.members = {"worker-a": "echo done > gate"}
    # `members` asserts the address.
    assert house.run() == Outcome(0)


GONE = Exited("shard-0", 7, -9, Path("shard-0.log"))
WORKER = Exited("worker-a", 8, 1, Path("worker-a.log"))


@pytest.mark.parametrize(
    ("exited", "phase", "workers_left", "expected"),
    [
        (GONE, "done", 0, Verdict("expected")),
        (GONE, "failed", 2, Verdict("expected")),
        (
            GONE,
            "training",
            2,
            Verdict(
                "fail",
                "shard-0 (pid 7) ended with signal SIGKILL, see shard-0.log; "
                "a job cannot go on without all its shards",
            ),
        ),
        (
            WORKER,
            "training",
            2,
            Verdict(
                "warn",
                "worker-a (pid 8) ended with exit status 1, see worker-a.log; "
                "2 left, the job goes on",
            ),
        ),
        (
            WORKER,
            "finishing",
            0,
            Verdict(
                "fail",
                "no worker is left: worker-a (pid 8) ended with exit status 1, see worker-a.log",
            ),
        ),
        (Exited("worker-b", 9, 0, Path("x")), "training", 1, Verdict("expected")),
    ],
)
def test_what_an_end_means(
    exited: Exited, phase: str, workers_left: int, expected: Verdict
) -> None:
    assert judge(exited, GetJobStatusResponse(phase=phase), workers_left) == expected


def test_a_worker_is_named_as_the_display_names_it() -> None:
    status = GetJobStatusResponse(
        phase="training", workers=[WorkerStatus(worker="worker-3", pid=WORKER.pid)]
    )
    assert judge(WORKER, status, 1).line.startswith("worker-a (pid 8, worker-3 of the job) ended")


def test_structured_logs_are_told_from_words() -> None:
    lines = [
        "2026-11-20T19:00:00.000001Z [info     ] serving",
        "2026-11-20 19:00:00 [info     ] serving",
        "\x1b[2m2026-11-20T19:00:00\x1b[0m [info] serving",
        '{"event": "serving"}',
        "2026 was a good year",
        "{x}",
        "error: y",
    ]
    assert plain_output(lines) == lines[4:]
