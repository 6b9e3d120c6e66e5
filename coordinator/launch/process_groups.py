"""Reads from the kernel how much CPU time process groups have used, and whether they want more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")

_STATE, _TIMES = 0, slice(11, 15)
"""Of the fields of /proc/PID/stat behind the program's name; see proc_pid_stat(5). The times are
utime, stime, cutime and cstime, in ticks."""


@dataclass(slots=True)
class Usage:
    """Of all processes of a group together.

    Attributes:
        cpu_s: CPU seconds, those of children that have ended included.
        runnable: whether one of their threads runs or waits for a CPU (R), or for a disk (D).
    """

    cpu_s: float = 0.0
    runnable: bool = False


def usage(groups: Collection[int]) -> dict[int, Usage]:
    """By process group; one without a process is missing. Empty where there is no /proc."""
    found: dict[int, Usage] = {}
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    for process in _numbered(_PROC):
        # Any process may end between two lines.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            group = os.getpgid(int(process.name))
            if group not in groups:
                continue
            ticks = sum(map(int, _stat(process)[_TIMES]))
            use = found.setdefault(group, Usage())
            use.cpu_s += ticks / ticks_per_s
            use.runnable = use.runnable or _runnable(process)
    return found


def _runnable(process: Path) -> bool:
    return any(_stat(thread)[_STATE] in "RD" for thread in _numbered(process / "task"))


def _stat(process: Path) -> list[str]:
    # The program's name comes before, in parentheses, and may hold anything.
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _numbered(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.name.isdecimal())
