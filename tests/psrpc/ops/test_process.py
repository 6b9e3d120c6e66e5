from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from psrpc.ops.process import PARENT_PID, READER_LEFT, StopSignals, on_stop_signals, while_read

CHILD = (
    "import os; from psrpc.ops.process import *;"
    " die_with_parent(); print(os.environ.get(PARENT_PID))"
)


def start(parent: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD.replace("PARENT_PID", repr(PARENT_PID))],
        capture_output=True,
        text=True,
        env={**os.environ, PARENT_PID: str(parent)},
        check=False,
    )


def test_a_child_goes_on_under_its_parent_and_keeps_the_name_to_itself() -> None:
    assert start(os.getpid()).stdout == "None\n"


def test_a_child_whose_parent_ended_while_it_started_does_not_begin() -> None:
    # To the child it looks as if it had been handed on to another process.
    orphan = start(os.getpid() + 1)
    assert (orphan.returncode, orphan.stdout) == (1, "")


@pytest.fixture
def own_handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    os.close(signal.set_wakeup_fd(-1))


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_comes_inside_a_lock_does_not_wait_for_it(number: signal.Signals) -> None:
    lock, came, done = threading.Lock(), threading.Event(), threading.Event()

    def stop(heard: int) -> None:
        assert heard == number
        came.set()
        # The limit ends a test that fails; it is not waited out otherwise.
        if lock.acquire(timeout=5):
            done.set()

    on_stop_signals(stop)
    with lock:
        signal.raise_signal(number)
        assert came.wait(30)
    assert done.wait(30)


@pytest.mark.usefixtures("own_handlers")
def test_a_signal_is_heard_while_the_main_thread_waits() -> None:
    """As it is one that comes just before that wait begins: neither interrupts it."""
    waiting, came = threading.Event(), threading.Event()
    on_stop_signals(lambda _number: came.set())

    def signalled() -> None:
        waiting.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    other = threading.Thread(target=signalled)
    other.start()
    waiting.set()
    assert came.wait(30)
    other.join()


def test_a_hangup_is_the_first_word_or_none() -> None:
    first, after = StopSignals(), StopSignals()
    assert [first.says(signal.SIGHUP), first.says(signal.SIGHUP)] == [True, False]
    assert first.says(signal.SIGINT), "at once"
    assert [after.says(signal.SIGINT), after.says(signal.SIGHUP)] == [True, False]
    assert after.says(signal.SIGTERM)
    assert not after.says(signal.SIGUSR1)


STOPS = """
import threading
from psrpc.ops.process import on_stop_signals
came = threading.Event()
on_stop_signals(lambda number: (print("heard", number, file=out, flush=True), came.set()))
out = open("heard", "w")
print("ready", flush=True)
came.wait()
"""


@pytest.mark.slow  # interpreters start
def test_a_terminal_that_is_closed_asks_to_stop(tmp_path: Path) -> None:
    leader, terminal = os.openpty()
    # A session of its own gets the first terminal that it opens.
    opens = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR))"
    process = subprocess.Popen(
        [sys.executable, "-c", opens + STOPS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(leader, 100)
    os.close(leader)
    assert process.wait(60) == 0
    assert (tmp_path / "heard").read_text() == f"heard {signal.SIGHUP.value}\n"


@pytest.mark.slow  # interpreters start
def test_a_process_started_to_ignore_hangups_does(tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", STOPS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert (tmp_path / "heard").read_text() == f"heard {signal.SIGTERM.value}\n"


@pytest.mark.slow  # interpreters start
@pytest.mark.parametrize(
    "command",
    [
        ("pserver.cli", "serve", "--shard", "0", "--show-config"),
        ("worker.cli", "completion", "bash"),
        ("coordinator.cli", "completion", "bash"),
    ],
)
def test_a_reader_that_leaves_is_no_error(command: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        found = subprocess.run(
            [sys.executable, "-m", *command], stdout=write, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write)
    assert (found.returncode, found.stderr) == (READER_LEFT, b"")


def test_another_pipe_that_breaks_is_one() -> None:
    def run() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        while_read(run)
