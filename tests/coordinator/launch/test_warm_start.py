"""Processes as forks of a server that imports nothing; the real one is in
``tests/e2e/test_warm_start.py``."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from coordinator.launch import warm_start
from coordinator.launch.commands import ClusterCommands, Command
from coordinator.launch.restarts import Outcome
from coordinator.launch.supervisor import Supervisor
from coordinator.launch.warm_start import WarmStart, engine_of, is_warm
from psrpc.ops.process import module_command
from psrpc.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from tests.coordinator.launch.fixtures import ENDS, ShellCluster, Status
from tests.psrpc.ops.forking import COMMAND, LONG_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks need Linux")

FORKED = "tests.psrpc.ops.forked"
SAYS = "from psrpc.ops import process; print('fork' if process._preloaded['here'] else 'fresh')"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "WORKER", FORKED)


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path.cwd())}


def ready(warm: WarmStart) -> WarmStart:
    """Once the server is ready, or off."""
    if warm._server is not None:
        assert select.select([warm._status], [], [], LONG_S)[0]
    warm.look()
    return warm


class Starts:
    """Starts processes and tells their output and the notes."""

    def __init__(self, warm: WarmStart, folder: Path, environment: dict[str, str]) -> None:
        self.warm = warm
        self.folder = folder
        self.environment = environment
        self.notes: list[str] = []

    def run(self, code: str = SAYS, **changes: str) -> tuple[int, str]:
        path = self.folder / "output"
        path.unlink(missing_ok=True)
        with path.open("ab") as output:
            process = self.warm.start_process(
                module_command(FORKED, code),
                {**self.environment, **changes},
                output.fileno(),
                self.folder,
                self.notes.append,
            )
        return process.wait(), path.read_text()


@contextmanager
def starts(folder: Path, environment: dict[str, str], **more: str) -> Iterator[Starts]:
    with WarmStart({**environment, **more}, COMMAND) as warm:
        yield Starts(ready(warm), folder, environment)


def test_a_process_is_a_fork_and_a_child_that_leads_its_group(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with starts(tmp_path, environment) as started:
        assert started.run() == (0, "fork\n")
        code = "import os; print(os.getppid(), os.getpgrp() == os.getpid()); sys.exit(75)"
        assert started.run(code) == (75, f"{os.getpid()} True\n")
        assert started.notes == []
        server = started.warm.pid
    assert not Path(f"/proc/{server}").exists()


def test_an_environment_that_differs_starts_fresh_and_says_so_once(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with starts(tmp_path, environment) as started:
        for _ in range(2):
            assert started.run(TF_ENABLE_ONEDNN_OPTS="0") == (0, "fresh\n")
        assert started.run() == (0, "fork\n")
    assert started.notes == [
        "a process starts without warm start: TF_ENABLE_ONEDNN_OPTS was unset at the import and is "
        "'0'"
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_without_its_server_processes_start_fresh_and_one_line_says_so(
    tmp_path: Path, environment: dict[str, str], number: int
) -> None:
    with starts(tmp_path, environment) as started:
        handle = os.pidfd_open(started.warm.pid)
        os.kill(started.warm.pid, number)
        assert select.select([handle], [], [], LONG_S)[0]
        os.close(handle)
        for _ in range(2):
            assert started.run() == (0, "fresh\n")
    assert started.notes == [
        f"processes start without warm start: the fork server has ended with status -{int(number)}"
    ]


def test_a_server_that_stands_still_is_given_up(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_start, "FORK_S", 0.01)
    with starts(tmp_path, environment) as started:
        os.kill(started.warm.pid, signal.SIGSTOP)
        for _ in range(2):
            assert started.run() == (0, "fresh\n")
        assert started.warm.pid == 0
    assert started.notes == [
        "processes start without warm start: the fork server did not answer within 0.01 s"
    ]


def test_a_fork_that_fails_starts_fresh(tmp_path: Path, environment: dict[str, str]) -> None:
    with starts(tmp_path, environment, BREAKS="fork") as started:
        assert started.run() == (0, "fresh\n")
        assert started.warm.ready
    assert len(started.notes) == 1
    assert "the fork server cannot fork: " in started.notes[0]


def test_a_failed_import_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    with starts(tmp_path, environment, BREAKS="import") as started:
        assert started.run() == (0, "fresh\n")
    assert started.notes == ["processes start without warm start: ImportError: no such library"]


def test_elsewhere_than_on_linux_processes_start_fresh(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with starts(tmp_path, environment) as started:
        assert started.run() == (0, "fresh\n")
    assert started.notes == [
        "processes start without warm start: forks need Linux, and this is darwin"
    ]


def test_a_worker_waits_for_the_import_until_its_deadline(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = {**environment, "BREAKS": "slow", "GATE": str(gate)}
    worker, other = module_command(FORKED, "run"), ["/bin/sh", "-c", "exit"]
    with WarmStart(slow, COMMAND) as warm:
        assert warm.waits(worker, tmp_path)
        assert not warm.waits(other, tmp_path)
        gate.write_text("go")
        assert not ready(warm).waits(worker, tmp_path)
        assert warm.ready
    with WarmStart(slow, COMMAND, limit_s=0.0) as warm:
        assert not warm.waits(worker, tmp_path)
        started = Starts(warm, tmp_path, environment)
        assert started.run() == (0, "fresh\n")
    assert started.notes == [
        "processes start without warm start: the fork server did not import TensorFlow within 0 s"
    ]


def test_only_the_keras_engine_makes_a_shard_need_tensorflow(tmp_path: Path) -> None:
    shard = module_command("pserver.cli", "serve", "--shard", "0")
    assert not is_warm(shard, tmp_path), "unknown"
    for text in ("[]", "{", '{"description": 1}', '{"description": {}}'):
        (tmp_path / "job.json").write_text(text)
        assert engine_of(tmp_path) == ""
    for engine, warm in (("numpy", False), ("keras", True)):
        (tmp_path / "job.json").write_text(json.dumps({"description": {"engine": engine}}))
        assert is_warm(shard, tmp_path) == warm
    assert not is_warm(module_command("coordinator.cli", "serve"), tmp_path)


def test_the_coordinator_has_forks_made_of_the_same_server(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no fork holds the socket, so the server ends with its clients."""
    monkeypatch.setattr(warm_start, "COORDINATOR", FORKED)
    code = (
        "import os, select; from psrpc.ops.fork_server import *; "
        "from psrpc.ops.process import module_command; "
        "server = ForkClient.inherited(os.environ); "
        f"command = module_command({FORKED!r}, {SAYS + '; sys.exit(4)'!r}); "
        "pending = server.ask(ForkRequest.of(command, os.environ, attended=True), 1, 2); "
        "pending.wait(60); pending.go(); select.select([pending.control], [], [], 60); "
        "sys.exit(status_in(pending.control.recv(4096)))"
    )
    with starts(tmp_path, environment) as started:
        assert started.run(code) == (4, "fork\n")


def test_orphans_are_reaped_and_known_children_are_not(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with starts(tmp_path, environment) as started:
        code = "import os; pid = os.fork(); pid and (print(pid), sys.stdout.flush(), os._exit(0))"
        _, said = started.run(code)
        orphan = int(said)
        assert os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT) is not None
        with subprocess.Popen(["/bin/true"]) as known:
            os.waitid(os.P_PID, known.pid, os.WEXITED | os.WNOWAIT)
            # A known one ahead of the orphan defers it to the next call.
            started.warm.reap({known.pid})
            assert known.wait() == 0
        started.warm.reap(())
        with pytest.raises(ChildProcessError):
            os.waitpid(orphan, os.WNOHANG)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ShellCluster]:
    status = Status()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_CoordinatorServicer_to_server(status, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield ShellCluster(tmp_path, f"127.0.0.1:{port}", status)
    server.stop(None)


def supervised(
    cluster: ShellCluster, worker: Sequence[str], environment: dict[str, str], warm: WarmStart
) -> tuple[Supervisor, threading.Thread, list[Outcome]]:
    script = f"cd {cluster.folder}; {cluster.serving(ENDS)}"
    coordinator = Command(["/bin/sh", "-c", script], os.environ)
    members = {"worker-a": Command(worker, environment)}
    supervisor = Supervisor(
        ClusterCommands(cluster.address, coordinator, members),
        cluster.folder,
        cluster.screen,
        warm_start=warm,
    )
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(supervisor.run()))
    return supervisor, thread, outcomes


@pytest.mark.slow
def test_a_killed_worker_starts_warm_again_once_the_import_is_done(
    cluster: ShellCluster, environment: dict[str, str]
) -> None:
    """The import takes longer than the coordinator; nothing starts before it is done."""
    folder = cluster.folder
    gate, told = cluster.fifo("import"), cluster.fifo("told")
    code = (
        f"{SAYS}; import os; os.chdir({str(folder)!r}); sys.stdout.flush()\n"
        "if not os.path.exists('been'):\n"
        "    open('been', 'w').close(); open('told', 'w').write('up'); os.kill(os.getpid(), 9)\n"
        "open('gate', 'w').write('go\\n'); open('end').read()"
    )
    slow = {**environment, "BREAKS": "slow", "GATE": str(gate)}
    with WarmStart(slow, COMMAND) as warm:
        _, thread, outcomes = supervised(cluster, module_command(FORKED, code), slow, warm)
        thread.start()
        cluster.screen.wait_for("waiting for TensorFlow to be imported")
        gate.write_text("go")
        assert told.read_text() == "up"
        thread.join(LONG_S)
    [outcome] = outcomes
    assert (outcome.exit_status, outcome.restarts) == (0, {"worker-a": 1})
    assert cluster.log("worker-a").read_text() == "fork\nfork\n"
    assert not any("without warm start" in line for line in cluster.screen.notes)
