"""Real processes: small shells, which start in milliseconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.launch.children import Children, Exited, event_of

# Far above what any of this takes; a test that waits so long has failed.
LONG_S = 60.0


class Shells:
    """Starts shell scripts as children and talks to them through FIFOs, so nothing sleeps."""

    def __init__(self, children: Children, folder: Path) -> None:
        self.children = children
        self.folder = folder

    def start(self, name: str, script: str) -> int:
        log = self.folder / "logs" / f"{name}.log"
        return self.children.start(name, ["/bin/sh", "-c", script], log, os.environ)

    def fifo(self, name: str) -> Path:
        path = self.folder / name
        os.mkfifo(path)
        return path


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Shells]:
    with Children() as children:
        yield Shells(children, tmp_path)
    assert children.alive() == []


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def test_an_end_is_reported_once_with_status_and_log(shells: Shells) -> None:
    pid = shells.start("shard-0", "echo out; echo err >&2; exit 3")
    log = shells.folder / "logs" / "shard-0.log"
    assert shells.children.wait(LONG_S) == [Exited("shard-0", pid, 3, log)]
    assert sorted(log.read_text().split()) == ["err", "out"]
    assert shells.children.poll() == []
    assert shells.children.alive() == []


def test_output_is_that_of_this_run(shells: Shells) -> None:
    for word in ("first", "second"):
        shells.start("shard-0", f"echo {word}; printf 'no newline \\377'")
        (exited,) = shells.children.wait(LONG_S)
        assert exited.output() == [word, "no newline \ufffd"]


def test_a_signal_is_named(shells: Shells) -> None:
    shells.start("worker-0", "kill -9 $$")
    (exited,) = shells.children.wait(LONG_S)
    assert (exited.status, exited.how()) == (-signal.SIGKILL, "signal SIGKILL")


def test_a_status_is_named() -> None:
    assert Exited("x", 1, 0, Path("x.log")).how() == "exit status 0"
    assert Exited("x", 1, -63, Path("x.log")).how() == "signal 63"


def test_poll_does_not_report_the_living(shells: Shells) -> None:
    gate = shells.fifo("gate")
    shells.start("worker-0", f"read line < {gate}")
    assert shells.children.poll() == []
    assert shells.children.alive() == ["worker-0"]
    gate.write_text("go\n")
    assert [exited.name for exited in shells.children.wait(LONG_S)] == ["worker-0"]


def test_a_request_to_stop_lets_a_child_clean_up(shells: Shells) -> None:
    ready = shells.fifo("ready")
    never = shells.fifo("never")
    shells.start(
        "worker-0", f"exec 3<>{never}; trap 'exit 7' TERM; echo up > {ready}; read line <&3"
    )
    assert ready.read_text() == "up\n"
    shells.children.send("worker-0", signal.SIGTERM)
    (exited,) = shells.children.wait(LONG_S)
    assert exited.status == 7


def test_a_signal_to_a_child_that_has_ended_leaves_its_end_to_be_reported(shells: Shells) -> None:
    pid = shells.start("worker-0", "exit 7")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    shells.children.send("worker-0", signal.SIGTERM)
    (exited,) = shells.children.poll()
    assert (exited.pid, exited.status) == (pid, 7)


def test_a_child_that_ignores_the_request_is_killed(shells: Shells) -> None:
    ready = shells.fifo("ready")
    never = shells.fifo("never")
    shells.start("deaf", f"trap '' TERM; echo up > {ready}; read line < {never}")
    assert ready.read_text() == "up\n"
    shells.children.send("deaf", signal.SIGTERM)
    (exited,) = shells.children.kill()
    assert exited.how() == "signal SIGKILL"


def test_grandchildren_end_with_their_child(shells: Shells) -> None:
    held = shells.fifo("held")
    never = shells.fifo("never")
    shells.start("worker-0", f"(read line < {never}) 9> {held} & exit 1")
    with held.open() as end:
        assert [exited.status for exited in shells.children.wait(LONG_S)] == [1]
        # Only the grandchild held the other side open: this returns when it is gone.
        assert end.read() == ""


def test_one_is_killed_with_what_it_started(shells: Shells) -> None:
    held, never = shells.fifo("held"), shells.fifo("never")
    shells.start("shard-0", f"exec 9> {held}; (read line < {never}) & read line < {never}")
    pid = shells.start("shard-1", f"read line < {never}")
    with held.open() as end:
        exited = shells.children.kill_one("shard-0")
        assert (exited.name, exited.how()) == ("shard-0", "signal SIGKILL")
        assert end.read() == ""
    assert shells.children.alive() == ["shard-1"]
    assert is_running(pid)


def test_a_stopped_child_is_listed_until_it_continues_or_ends(shells: Shells) -> None:
    never = shells.fifo("never")
    pid = shells.start("shard-0", f"read line < {never}")
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert [shells.children.stopped() for _ in range(2)] == 2 * [["shard-0"]]
        assert shells.children.poll() == []
        os.kill(pid, signal.SIGCONT)
        os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOWAIT)
        assert shells.children.stopped() == []
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert shells.children.stopped() == []
    assert [exited.name for exited in shells.children.poll()] == ["shard-0"]


def test_words_are_told_from_structured_logs(shells: Shells) -> None:
    lines = [
        "2026-11-20T19:00:00.000001Z [info     ] serving",
        "2026-11-20 19:00:00 [info     ] serving",
        "\x1b[2m2026-11-20T19:00:00\x1b[0m [info] serving",
        '{"event": "serving"}',
        "2026 was a good year",
        "{x}",
        "error: y",
    ]
    (shells.folder / "said").write_text("\n".join(lines))
    shells.start("shard-0", f"cat {shells.folder}/said")
    (exited,) = shells.children.wait(LONG_S)
    assert exited.output() == [line.replace("\x1b", "\ufffd") for line in lines]
    assert exited.words() == lines[4:]


def test_no_terminal_obeys_what_a_child_has_printed(shells: Shells) -> None:
    shells.start("worker-a", r"printf 'Traceback\n\tmine: \033]0;owned\007\033[2J\n'")
    (exited,) = shells.children.wait(LONG_S)
    assert exited.words() == ["Traceback", "        mine: \ufffd]0;owned\ufffd\ufffd[2J"]


def test_leaving_the_block_kills_all(tmp_path: Path) -> None:
    with Children() as children:
        shells = Shells(children, tmp_path)
        never = shells.fifo("never")
        pids = [shells.start(f"child-{i}", f"read line < {never}") for i in range(3)]
    assert not any(is_running(pid) for pid in pids)


def test_a_program_that_is_not_there_is_an_error(shells: Shells) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        shells.children.start("x", ["/no-such-program"], shells.folder / "x.log", os.environ)
    assert shells.children.alive() == []


def test_a_sample_says_what_a_child_and_its_own_children_have_used_and_said(
    shells: Shells,
) -> None:
    ready, gate = shells.fifo("ready"), shells.fifo("gate")
    # One that has ended, and was waited for, and one that waits.
    work = "i=0; while test $i -lt 100000; do i=$((i+1)); done"
    shells.start(
        "worker-a",
        f"echo first; sh -c '{work}'; echo 'loading TensorFlow'; echo; "
        f"(read x < {gate}) & echo x > {ready}; read x < {gate}",
    )
    shells.start("worker-b", f"read x < {gate}")
    ready.read_text()
    samples = shells.children.samples(["worker-a", "worker-c"])
    assert list(samples) == ["worker-a"]
    assert samples["worker-a"].cpu_s > 0
    assert samples["worker-a"].milestone == "loading TensorFlow"


def test_a_child_that_wants_the_cpu_is_runnable(shells: Shells) -> None:
    gate = shells.fifo("gate")
    shells.start("worker-a", "while :; do :; done")
    shells.start("worker-b", f"echo x > {gate}; read x < {gate}")
    gate.read_text()
    # A process that waits may be on its way there.
    while shells.children.samples(["worker-b"])["worker-b"].runnable:
        pass
    assert shells.children.samples(["worker-a"])["worker-a"].runnable


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        (
            "2026-01-01T00:00:00.123456 [info     ] listening  port=1 role='shard 0'",
            "listening  port=1 role='shard 0'",
        ),
        ('{"event": "listening", "port": 1}', "listening"),
        ('{"port": 1', '{"port": 1'),
        ("a" * 200, "a" * 119 + "…"),
        ("\x1b[31mred", "\N{REPLACEMENT CHARACTER}[31mred"),
    ],
)
def test_the_event_of_a_line(line: str, event: str) -> None:
    assert event_of(line) == event
