"""Child processes of ``coordinator up``: starts and watches them, and stops them in any case."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.launch.process_health import Sample
from coordinator.launch.warm_start import ChildProcess, Launch, start_fresh
from psrpc.core.text import sanitize, sanitize_lines
from psrpc.files.storage import check_regular, open_regular

_PROC = Path("/proc")

_STATE, _TIMES = 0, slice(11, 15)
"""Indices of the fields of /proc/PID/stat after the program's name; see proc_pid_stat(5). The times
are utime, stime, cutime and cstime, in ticks."""
POLL_S = 0.02
OUTPUT_BYTES = 64 << 10
SHOWN_LINES = 15
EVENT_BYTES = 4 << 10
EVENT_CHARS = 120
_LOG_LINE = re.compile(r'(\x1b\[\d+m)?\d{4}-\d\d-\d\d[T ]|\{"')
_LOG_PREFIX = re.compile(r"\d{4}-\d\d-\d\d[T ]\S* *\[\w+ *\] *")


@dataclass(frozen=True)
class Exited:
    """A child that has ended.

    Attributes:
        name: e.g. ``"shard-0"``; also the name of its log file.
        status: the exit status; -N when signal N killed it.
        log: the file that its output is appended to, after that of earlier processes of this name.
        log_start: the offset of its own output in ``log``, in bytes.
    """

    name: str
    pid: int
    status: int
    log: Path
    log_start: int = 0

    def how(self) -> str:
        """Returns "exit status 1" or "signal SIGKILL"."""
        if self.status >= 0:
            return f"exit status {self.status}"
        try:
            return f"signal {signal.Signals(-self.status).name}"
        except ValueError:
            return f"signal {-self.status}"

    def output(self) -> list[str]:
        """Returns the last lines of its output, at most 64 KiB, without terminal sequences."""
        return list(map(_shown, self._output()))

    def words(self) -> list[str]:
        """Returns those last lines that are not structured log: error lines and tracebacks."""
        return [_shown(line) for line in self._output() if not _LOG_LINE.match(line)]

    def last_words(self) -> list[str]:
        """Returns the lines to show of its log."""
        return (self.words() or self.output())[-SHOWN_LINES:]

    def _output(self) -> list[str]:
        return _tail(self.log, self.log_start, OUTPUT_BYTES)


def _tail(log: Path, start: int, nbytes: int) -> list[str]:
    """Returns the lines in the last ``nbytes`` of a log after ``start``. Raises OSError."""
    with open_regular(log) as opened:
        opened.seek(max(start, opened.seek(0, os.SEEK_END) - nbytes))
        return opened.read().decode(errors="replace").splitlines()


def event_of(line: str) -> str:
    """Returns the message of a log line without time and level, shortened to fit in a message."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            line = str(json.loads(line).get("event", line))
    return sanitize(_LOG_PREFIX.sub("", line).strip(), EVENT_CHARS)


def _opened(log: Path) -> io.BufferedWriter:
    """Opens a log to append to. Raises OSError; does not block on a FIFO in its place."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(log, flags, 0o666)
    try:
        check_regular(os.fstat(handle).st_mode, log)
        return os.fdopen(handle, "ab")
    except BaseException:
        os.close(handle)
        raise


def _shown(line: str) -> str:
    return sanitize_lines(line, OUTPUT_BYTES)


@dataclass(frozen=True)
class _Child:
    name: str
    log: Path
    log_start: int
    process: ChildProcess


class Children:
    """A set of processes that ends with the ``with`` block; not thread-safe.

    Each child leads a process group of its own. So a Ctrl-C at the terminal reaches only the
    parent, which decides which child to signal, and a child's descendants end with it. If the
    parent is killed, children end by themselves (``psrpc.ops.process.die_with_parent``).
    """

    def __init__(self) -> None:
        self._alive: dict[str, _Child] = {}

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        launch: Launch = start_fresh,
    ) -> int:
        """Starts a process whose output is appended to ``log``; returns its process id.

        Args:
            launch: starts the process as leader of a process group.

        Raises:
            OSError: the program or the log file cannot be opened.
        """
        assert name not in self._alive, name
        log.parent.mkdir(parents=True, exist_ok=True)
        with _opened(log) as output:
            log_start = output.tell()
            process = launch(command, environment, output.fileno())
        self._alive[name] = _Child(name, log, log_start, process)
        return process.pid

    def pids(self) -> set[int]:
        """Returns the process ids of the children whose end was not reported yet."""
        return {child.process.pid for child in self._alive.values()}

    def alive(self) -> list[str]:
        """Returns the names of the children whose end was not reported yet, in starting order."""
        return list(self._alive)

    def poll(self) -> list[Exited]:
        """Returns the children that have ended since the last call; reports each once."""
        return [self._reap(child) for child in list(self._alive.values()) if _has_ended(child)]

    def wait(self, seconds: float) -> list[Exited]:
        """Like :meth:`poll`, but waits up to ``seconds`` for a child to end."""
        deadline = time.monotonic() + seconds
        while True:
            exited = self.poll()
            left = deadline - time.monotonic()
            if exited or left <= 0 or not self._alive:
                return exited
            time.sleep(min(POLL_S, left))

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends one child a signal; does nothing if it has ended."""
        if name in self._alive:
            # Popen.send_signal would reap a child that has just ended. Until :meth:`_reap`, its
            # process id is not reused, so this signal reaches no other process.
            os.kill(self._alive[name].process.pid, number)

    def stopped(self) -> list[str]:
        """Returns the children that are stopped (SIGSTOP)."""
        return [child.name for child in self._alive.values() if _is_stopped(child)]

    def samples(self, names: Collection[str]) -> dict[str, Sample]:
        """Samples children from /proc and their logs; leaves out those without data."""
        groups = {c.process.pid: c for name, c in self._alive.items() if name in names}
        return {
            groups[group].name: Sample(use.cpu_s, use.runnable, _last_event(groups[group]))
            for group, use in usage(groups).items()
        }

    def kill_one(self, name: str) -> Exited:
        """Kills a live child and its descendants, and waits for its end."""
        child = self._alive[name]
        _kill_group(child)
        return self._reap(child)

    def kill(self) -> list[Exited]:
        """Kills all remaining children and their descendants, and waits for their end."""
        for child in self._alive.values():
            _kill_group(child)
        return [self._reap(child) for child in list(self._alive.values())]

    def _reap(self, child: _Child) -> Exited:
        # Kill the group before its leader is reaped: afterwards another group may get its number.
        os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
        _kill_group(child)
        status = child.process.wait()
        del self._alive[child.name]
        return Exited(child.name, child.process.pid, status, child.log, child.log_start)


def _has_ended(child: _Child) -> bool:
    options = os.WEXITED | os.WNOWAIT | os.WNOHANG
    return os.waitid(os.P_PID, child.process.pid, options) is not None


def _last_event(child: _Child) -> str:
    with contextlib.suppress(OSError):
        lines = _tail(child.log, child.log_start, EVENT_BYTES)
        return next(filter(None, map(event_of, reversed(lines))), "")
    return ""


def _is_stopped(child: _Child) -> bool:
    options = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
    try:
        return os.waitid(os.P_PID, child.process.pid, options) is not None
    except ChildProcessError:
        # It has ended; a later poll reports that.
        return False


def _kill_group(child: _Child) -> None:
    # macOS raises PermissionError for a group that holds only a zombie.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)


@dataclass(slots=True)
class Usage:
    """The usage of all processes of a group together.

    Attributes:
        cpu_s: CPU seconds, including those of children that have ended.
        runnable: whether a thread runs or waits for a CPU (R) or a disk (D).
    """

    cpu_s: float = 0.0
    runnable: bool = False


def usage(groups: Collection[int]) -> dict[int, Usage]:
    """Returns the usage by process group; skips empty groups. Empty without /proc."""
    usages: dict[int, Usage] = {}
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    for process in _numbered(_PROC):
        # Any process may end between two reads.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            group = os.getpgid(int(process.name))
            if group not in groups:
                continue
            ticks = sum(map(int, _stat(process)[_TIMES]))
            use = usages.setdefault(group, Usage())
            use.cpu_s += ticks / ticks_per_s
            use.runnable = use.runnable or _runnable(process)
    return usages


def _runnable(process: Path) -> bool:
    return any(_stat(thread)[_STATE] in "RD" for thread in _numbered(process / "task"))


def _stat(process: Path) -> list[str]:
    # The program's name comes before, in parentheses, and may contain any characters.
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _numbered(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.name.isdecimal())
