"""The processor time and memory of processes."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Returns the processor seconds that a process has used, in user code and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_mb(pid: int) -> float:
    """Returns the resident memory of a process, in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def confine(pid: int, core: int) -> None:
    """Confines a process, 0 for this one, to a core if it may use that; does nothing otherwise."""
    if core in os.sched_getaffinity(0):
        for thread in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
