"""The protocol of the fork server with a real one that imports nothing."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from psrpc.ops.fork_server import (
    FORK_SERVER,
    ForkClient,
    ForkedProcess,
    ForkFailed,
    ForkRequest,
    ForkServerLost,
    PendingFork,
    module_of,
    status_in,
)
from psrpc.ops.process import module_command
from tests.psrpc.ops.forking import LONG_S, BareServer, bare_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks need Linux")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareServer]:
    with bare_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(shared: BareServer) -> BareServer:
    shared.output.unlink(missing_ok=True)
    return shared


def message(pending: PendingFork) -> bytes:
    """The next message on a control socket; empty once nothing holds the other end."""
    assert select.select([pending.control], [], [], LONG_S)[0]
    return pending.control.recv(4096)


def outcome(server: BareServer, code: str, **changes: str) -> tuple[int, str]:
    """The exit status and the output of a fork that runs ``code``."""
    with server.ask(code, **changes) as pending:
        pending.wait(LONG_S)
        pending.go()
        return status_in(message(pending)), server.output.read_text()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("sys.exit(75)", 75),
        ("sys.exit()", 0),
        ("sys.exit(True)", 1),
        ("sys.exit(300)", 300 & 0xFF),
        ("import os; os._exit(130)", 130),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2),
    ],
)
def test_exit_statuses_pass_through(server: BareServer, code: str, status: int) -> None:
    assert outcome(server, code)[0] == status


def test_words_of_an_end_are_printed(server: BareServer) -> None:
    assert outcome(server, "sys.exit('no such file')") == (1, "no such file\n")


def test_an_error_prints_its_traceback(server: BareServer) -> None:
    status, said = outcome(server, "{}['missing']")
    assert status == 1
    assert said.splitlines()[-1] == "KeyError: 'missing'"


def test_a_process_looks_like_a_fresh_one(server: BareServer) -> None:
    code = (
        "import os, json; from pathlib import Path; from psrpc.ops.threads import THREADS;"
        "print(json.dumps([sys.argv[1:], os.environ['NEW'], os.environ.get('GONE'), os.getcwd(),"
        "sorted(map(int, os.listdir('/proc/self/fd'))), sys.stdin.read(), THREADS.chance(),"
        "Path('/proc/self/cmdline').read_text()]))"
    )
    _, said = outcome(server, code, NEW="value \udcff")
    arguments, new, gone, directory, handles, read, chance, line = json.loads(said)
    assert arguments == [code]
    assert (new, gone, directory, read) == ("value \udcff", None, str(Path.cwd()), "")
    # The highest lists the others.
    assert handles[:3] == [0, 1, 2]
    own = {int(path.name) for path in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    assert set(handles[:-1]) <= own
    command = " ".join(module_command("tests.psrpc.ops.forked", code))
    assert line.rstrip("\0") == command[: len(line)]
    server.output.unlink()
    assert json.loads(outcome(server, code, NEW="")[1])[6] != chance


def test_no_socket_of_the_server_leaks_into_a_fork(server: BareServer) -> None:
    code = (
        "import os;"
        "print([link for handle in os.listdir('/proc/self/fd') if os.path.exists("
        "f'/proc/self/fd/{handle}') for link in [os.readlink(f'/proc/self/fd/{handle}')] "
        "if link.startswith(('socket', 'memfd', '/memfd'))])"
    )
    assert outcome(server, code) == (0, "[]\n")


def test_a_fork_joins_the_group_that_the_client_names(server: BareServer) -> None:
    with subprocess.Popen(["sleep", "60"], process_group=0) as leader:
        request = server.request("import os; print(os.getpgrp())")
        changed = ForkRequest(**{**vars(request), "group": leader.pid})
        with server.ask_for(changed) as pending:
            pending.wait(LONG_S)
            pending.go()
            assert status_in(message(pending)) == 0
        leader.kill()
        assert server.output.read_text() == f"{leader.pid}\n"


def test_a_group_that_has_ended_fails_before_anything_runs(server: BareServer) -> None:
    request = server.request("print('ran')")
    asked = ForkRequest(**{**vars(request), "group": 1})
    with server.ask_for(asked) as pending, pytest.raises(ForkFailed, match="not permitted"):
        pending.wait(LONG_S)
    assert server.output.read_text() == ""


def test_a_client_that_gave_up_gets_no_late_process(server: BareServer, tmp_path: Path) -> None:
    """It neither runs nor stays, whether the client gave up before or after the answer."""
    os.kill(server.process.pid, signal.SIGSTOP)
    early = server.ask(f"open({str(tmp_path / 'early')!r}, 'w')")
    with pytest.raises(ForkServerLost, match=r"did not answer within 0\.01 s"):
        early.wait(0.01)
    early.close()
    os.kill(server.process.pid, signal.SIGCONT)
    with server.ask(f"open({str(tmp_path / 'late')!r}, 'w')") as late:
        pid = late.wait(LONG_S)
        handle = os.pidfd_open(pid)
    assert select.select([handle], [], [], LONG_S)[0], "it has ended"
    os.close(handle)
    # Requests are served in order: what was asked for before would have run.
    assert outcome(server, "pass")[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "OMP_NUM_THREADS"])
def test_an_import_that_would_differ_is_refused(server: BareServer, name: str) -> None:
    words = f"^{name} was unset at the import and is 'other'$"
    with (
        server.ask("pass", **{name: "other"}) as pending,
        pytest.raises(ForkFailed, match=words),
    ):
        pending.wait(LONG_S)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "TF_NUM_INTRAOP_THREADS", "MINE"])
def test_values_read_later_may_differ(server: BareServer, name: str) -> None:
    code = f"import os; print(os.environ[{name!r}])"
    assert outcome(server, code, **{name: "1"}) == (0, "1\n")


def test_a_malformed_request_is_answered(server: BareServer) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, server.output.open("w+b") as output:
        output.write(b"{}")
        output.flush()
        handles = [output.fileno(), theirs.fileno(), 1, 2]
        sent = socket.socket(fileno=os.dup(server.client.fileno()))
        with sent:
            socket.send_fds(sent, [b"\0"], handles)
    with PendingFork(ours) as pending, pytest.raises(ForkFailed, match="missing 5 required"):
        pending.wait(LONG_S)


@pytest.mark.parametrize("which", ["fork", "second fork"])
def test_a_fork_that_fails_is_answered_and_the_server_goes_on(tmp_path: Path, which: str) -> None:
    with bare_server(tmp_path, BREAKS=which) as server:
        for _ in range(2):
            with (
                server.ask("pass") as pending,
                pytest.raises(ForkFailed, match=r"cannot fork: .*temporarily unavailable"),
            ):
                pending.wait(LONG_S)
        assert server.process.poll() is None


def test_a_killed_server_is_told_from_a_refusal(tmp_path: Path) -> None:
    with bare_server(tmp_path) as server:
        os.kill(server.process.pid, signal.SIGSTOP)
        pending = server.ask("pass")
        server.process.kill()
        with pending, pytest.raises(ForkServerLost, match="has ended"):
            pending.wait(LONG_S)
        server.process.wait()
        with pytest.raises(ForkServerLost, match="takes no request"):
            server.ask("pass")


def test_an_offer_is_taken_once() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        handle = ours.detach()
        os.set_inheritable(handle, True)
        environment = {FORK_SERVER: str(handle), "OTHER": "1"}
        client = ForkClient.inherited(environment)
        assert client is not None
        assert (client.fileno(), os.get_inheritable(handle)) == (handle, False)
        assert environment == {"OTHER": "1"}
        client.close()
    assert ForkClient.inherited(environment) is None
    assert ForkClient.inherited({FORK_SERVER: "words"}) is None


def test_a_full_queue_is_a_failure_and_no_wait() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = ForkClient(ours)
    request = ForkRequest.of(module_command("tests.psrpc.ops.forked", "pass"), {})

    def ask_forever() -> None:
        with ExitStack() as held:
            while True:
                held.enter_context(client.ask(request, 1, 2))

    with theirs, pytest.raises(ForkServerLost, match="takes no request"):
        ask_forever()
    client.close()


def test_a_module_is_found_in_its_command() -> None:
    assert module_of(module_command("worker.cli", "run")) == "worker.cli"
    assert module_of(["/bin/sh", "-c", "exit"]) == ""


def test_a_keeper_that_was_killed_counts_as_killed() -> None:
    assert status_in(b"") == -signal.SIGKILL
    assert status_in(b'{"status": 75}') == 75


def child(code: str) -> ForkedProcess:
    """A child of this process, which waits for a line on a pipe if it reads one."""
    fresh = subprocess.Popen([sys.executable, "-S", "-E", "-c", code], stdin=subprocess.DEVNULL)
    fresh.returncode = 0  # reaped below
    return ForkedProcess(fresh.pid, ["python"])


def test_an_adopted_process_is_waited_for_and_reported_again() -> None:
    process = child("raise SystemExit(3)")
    assert process.wait(LONG_S) == 3
    assert (process.poll(), process.wait(), process.returncode) == (3, 3, 3)
    process.kill()


def test_an_adopted_process_is_signalled() -> None:
    process = child("import signal; signal.pause()")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    process.kill()
    assert process.wait() == -signal.SIGKILL
