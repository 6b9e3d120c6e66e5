"""``worker describe`` as a fork of a server that imports nothing."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from coordinator.process import describing
from coordinator.process.describing import DescribeFailed, describe_job
from psrpc.core.errors import InvalidJob
from psrpc.ops.process import module_command
from tests.coordinator.builders import description_json
from tests.psrpc.ops.forking import LONG_S, BareServer, bare_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks need Linux")

FORKED = "tests.psrpc.ops.forked"
PRINTS = f"print({json.dumps(description_json())!r})"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BareServer]:
    with bare_server(tmp_path) as server:
        yield server


def described(server: BareServer, code: str, **changes: str) -> str:
    """The name of the job that ``code`` describes."""
    command = module_command(FORKED, code)
    environment = {**server.environment, **changes}
    return asyncio.run(describe_job(command, environment, server.client)).name


def test_a_description_comes_from_a_fork_in_the_group_of_the_coordinator(
    server: BareServer,
) -> None:
    """So the supervisor sees its CPU time, and ends it with the coordinator."""
    code = (
        f"import os; from psrpc.ops import process; assert os.getpgrp() == {os.getpgrp()};"
        f"assert process._preloaded['here']; {PRINTS}"
    )
    assert described(server, code) == description_json()["name"]


def test_a_refused_job_says_what_it_wrote(server: BareServer) -> None:
    with pytest.raises(DescribeFailed, match=r"^error PS101: no such thing$"):
        described(server, "sys.stderr.write('error PS101: no such thing\\n'); sys.exit(2)")


def test_bytes_that_are_no_text_are_no_description(server: BareServer) -> None:
    with pytest.raises(InvalidJob, match="which is not JSON"):
        described(server, "sys.stdout.buffer.write(b'\\xff')")


def test_a_killed_fork_is_a_failure_with_its_status(server: BareServer) -> None:
    with pytest.raises(DescribeFailed, match="ended with exit status -9 and no word"):
        described(server, "import os; os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("lost", [True, False])
def test_a_job_that_cannot_be_forked_is_described_afresh_and_one_line_says_why(
    server: BareServer, lost: bool
) -> None:
    if lost:
        server.process.kill()
        server.process.wait()
    else:
        os.kill(server.process.pid, signal.SIGCONT)
    code = f"from psrpc.ops import process; assert not process._preloaded['here']; {PRINTS}"
    changes = {} if lost else {"OMP_NUM_THREADS": "7"}
    with structlog.testing.capture_logs() as logs:
        assert described(server, code, **changes) == description_json()["name"]
    [line] = logs
    assert line["event"] == "the job is described without warm start"
    assert ("takes no request" if lost else "OMP_NUM_THREADS was unset") in line["reason"]


def test_a_server_that_does_not_answer_has_a_deadline_and_forks_nothing_later(
    server: BareServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(describing, "IMPORT_S", 0.01)
    os.kill(server.process.pid, signal.SIGSTOP)
    code = f"open({str(tmp_path / 'ran')!r}, 'a').write('x'); {PRINTS}"
    with structlog.testing.capture_logs() as logs:
        described(server, code)
    assert logs[0]["reason"] == "the fork server did not import TensorFlow within 0.01 s"
    os.kill(server.process.pid, signal.SIGCONT)
    # Served after the other request.
    with server.ask("pass") as pending:
        pending.wait(LONG_S)
    assert (tmp_path / "ran").read_text() == "x"


def test_cancelling_kills_the_fork(server: BareServer, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"import os; open({str(fifo)!r}, 'w').write(str(os.getpid()))"

    async def cancelled() -> int:
        command = module_command(FORKED, f"{code}; import signal; signal.pause()")
        task = asyncio.ensure_future(describe_job(command, dict(server.environment), server.client))
        # Opening waits for the fork, which the loop has to let go.
        pid = int(await asyncio.to_thread(fifo.read_text))
        handle = os.pidfd_open(pid)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return handle

    handle = asyncio.run(cancelled())
    assert select.select([handle], [], [], LONG_S)[0], "it has ended"
    os.close(handle)
