"""Runs real clusters: the commands a user would type, as processes, on real ports."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from psrpc.ops.fork_server import ForkFailed
from tests.e2e.warm import Fork, fork

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = Path(__file__).resolve().parent / "jobs"
EXAMPLES = ROOT / "examples"

LIMIT_S = 240
"""A hang guard, far above what any of these runs takes."""


@dataclass(frozen=True)
class Run:
    """A finished ``coordinator up``."""

    run_dir: Path
    code: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return document

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint's directory."""
        return max((self.run_dir / "checkpoints").glob("step-*"))

    def logs(self) -> str:
        """All logs, for a failing test to show."""
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted((self.run_dir / "logs").glob("*.log"))
        )


def command(role: str, *args: str | Path) -> list[str]:
    """``role`` is one of the three commands, or a module."""
    return [sys.executable, "-m", module_of_role(role), *map(str, args)]


def module_of_role(role: str) -> str:
    return role if "." in role else f"{role}.cli"


def launch(
    role: str, args: Sequence[str | Path], env: Mapping[str, str], stdout: IO[Any], stderr: IO[Any]
) -> subprocess.Popen[Any] | Fork:
    """Starts a command, as a fork unless ``env`` has what only a fresh process obeys."""
    words, outputs = list(map(str, args)), (stdout.fileno(), stderr.fileno())
    try:
        return fork(module_of_role(role), words, environment(**env), *outputs)
    except ForkFailed:
        return subprocess.Popen(
            command(role, *args), stdout=stdout, stderr=stderr, env=environment(**env)
        )


def ended(role: str, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        code = launch(role, args, env, stdout, stderr).wait(LIMIT_S)
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(args, code, stdout.read(), stderr.read())


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **extra}


def up(job: Path, run_dir: Path, *args: str | Path, check: bool = True, **env: str) -> Run:
    """Runs ``coordinator up`` to its end."""
    done = ended("coordinator", "up", job, "--run-dir", run_dir, *args, **env)
    run = Run(run_dir, done.returncode, done.stdout, done.stderr)
    if check:
        assert run.code == 0, f"{run.stdout}\n{run.stderr}\n{run.logs()}"
    assert not processes_of(run_dir), "a process outlived the job"
    return run


def processes_of(run_dir: Path) -> list[int]:
    """Live processes that name the run directory or log into it."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            line = (proc / "cmdline").read_bytes().decode(errors="replace")
            out = str((proc / "fd" / "2").readlink())
        except OSError:
            continue
        if proc.name != str(os.getpid()) and (str(run_dir) in line or str(run_dir) in out):
            found.append(int(proc.name))
    return found


def members(run_dir: Path, role: str) -> list[int]:
    """The live shards (``pserver``), workers (``worker``) or the ``coordinator`` of a ``coordinator
    up``."""
    words = {
        "coordinator": " coordinator.cli serve ",
        "pserver": " pserver.cli serve ",
        "worker": " worker.cli run ",
    }[role]
    found = []
    for pid in processes_of(run_dir):
        with suppress(OSError):
            if words in command_line(pid):
                found.append(pid)
    return found


def command_line(pid: int) -> str:
    """The words of a process's command line as ``ps`` shows them, which are one in a fork."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")


def maps(pid: int) -> str:
    """Mappings of a process, a line each; empty if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


def segments(pid: int) -> set[int]:
    """Inode numbers of the shared segments that a process has mapped or open."""
    found = set(map(int, re.findall(r" (\d+) +/memfd:pserver-segment", maps(pid))))
    # Files are closed, and processes end, while they are looked at.
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(link.readlink()).startswith("/memfd:pserver-segment"):
                    found.add(link.stat().st_ino)
    return found


def holders(segment: int) -> list[int]:
    """The processes on this machine that have a segment mapped or open."""
    pids = [int(process.name) for process in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if segment in segments(pid)]


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for events without an announcement, such as the kernel taking a mapping away."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"in vain waited for: {what}"
        time.sleep(0.02)


def wait_until_gone(pids: Sequence[int]) -> None:
    """Waits for processes that are not children of this one."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([fd], [], [], LIMIT_S)[0], f"process {pid} is still there"
        finally:
            os.close(fd)


class Process:
    """One command of a cluster that is started by hand, of a ``role`` or, with ``line``, any and as
    a fresh process. Its output is read as it comes."""

    def __init__(
        self, name: str, role: str, *args: str | Path, line: Sequence[str] = (), **env: str
    ) -> None:
        self.name = name
        self._text = ""
        self._changed = threading.Condition()
        source, sink = os.pipe()
        self._output = open(source)  # noqa: PTH123, SIM115
        with open(sink, "wb", buffering=0) as out:  # noqa: PTH123
            self.popen = (
                subprocess.Popen(line, stdout=out, stderr=out, env=environment(**env))
                if line
                else launch(role, args, env, out, out)
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ended = False

    def _read(self) -> None:
        for line in self._output:
            with self._changed:
                self._text += line
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self) -> int:
        """Its exit code."""
        code = self.popen.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until the output matches ``pattern``."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or re.search(pattern, self._text), LIMIT_S)
            found = re.search(pattern, self._text)
        assert found, f"{self.name} never said {pattern!r}:\n{self._text}"
        return found

    def text(self) -> str:
        """Everything it has said so far."""
        with self._changed:
            return self._text

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def end(self) -> None:
        """Kills what is left and lets go of the pipe."""
        self.kill()
        self.wait()
        self._output.close()


class Gate:
    """Holds the workers of ``jobs/gated.py`` before the first batch of an epoch."""

    def __init__(self, folder: Path, epoch: int) -> None:
        """``epoch`` counts from 0."""
        self._path = folder / "gate"
        os.mkfifo(self._path)
        self._fd: int | None = None
        self.environment = {"GATE": str(self._path), "GATE_EPOCH": str(epoch)}

    def open(self) -> None:
        """Lets them go on, for good."""
        # For reading as well, since it would wait for a reader otherwise.
        self._fd = os.open(self._path, os.O_RDWR)

    def close(self) -> None:
        """Lets go of the file."""
        if self._fd is not None:
            os.close(self._fd)


class Hand:
    """A cluster started by hand, process by process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.processes: list[Process] = []

    def start(self, name: str, role: str, *args: str | Path, **env: str) -> Process:
        process = Process(name, role, *args, **env)
        self.processes.append(process)
        return process

    def coordinator(self, job: Path, *args: str | Path, bind: str = "127.0.0.1:0") -> Process:
        where = ("--run-dir", self.run_dir, "--bind", bind)
        return self.start("coordinator", "coordinator", "serve", "--job", job, *where, *args)

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.text()[-3000:]}" for p in self.processes)


@contextmanager
def by_hand(folder: Path) -> Iterator[Hand]:
    """Ends every process that the test left running."""
    hand = Hand(folder)
    try:
        yield hand
    finally:
        for process in hand.processes:
            process.end()


def codes(processes: Sequence[Process]) -> list[int]:
    return [process.wait() for process in processes]
