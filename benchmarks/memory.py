"""How much memory processes take, and how much a shard and a cluster may."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MB = 1_000_000
INTERVAL_S = 0.02

FIXED_BYTES = {"keras": 400 * MB, "numpy": 100 * MB}
"""What a shard may take beside its parameters: interpreter, libraries, the wire's buffers."""

FIELDS = ("VmHWM", "RssAnon", "RssShmem", "RssFile")

_LINE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def parse_kilobytes(text: str) -> dict[str, int]:
    """The sizes in a /proc/PID/status or /proc/meminfo, in bytes."""
    return {name: 1024 * int(kilobytes) for name, kilobytes in _LINE.findall(text)}


def bound(parameters: int, slots: int, replicas: int, engine: str) -> int:
    """The most that a shard may take: ``2 (1 + slots) parameters + (K + 2) largest push + fixed``.

    Args:
        parameters: bytes on this shard; a push is as large.
        slots: arrays that the optimizer keeps beside the parameters.
        replicas: K micro-batches of a round, 0 in async mode.
    """
    return 2 * (1 + slots) * parameters + (replicas + 2) * parameters + FIXED_BYTES[engine]


def cluster_bytes(parameters: int, shards: int, workers: int, slots: int = 0) -> int:
    """About what a whole cluster takes: the shards their bound; a worker two sets of parameters, an
    outbox, what TensorFlow makes and as much again; and 1 GB for every process with TensorFlow."""
    return (
        (5 * workers + 2 * (1 + slots) + workers + 2) * parameters
        + (workers + 2) * 1000 * MB
        + shards * FIXED_BYTES["keras"]
    )


def available_bytes() -> int:
    """Memory that is available to new processes on this machine."""
    return parse_kilobytes(Path("/proc/meminfo").read_text())["MemAvailable"]


@dataclass(frozen=True)
class Peak:
    """The most that one process took, in bytes.

    Attributes:
        rss: of everything (VmHWM, kept by the kernel).
        anonymous: of its own (RssAnon), as sampled.
        shared: of shared memory (RssShmem), as sampled: the workers' segments.
        files: of mapped files (RssFile), as sampled: libraries. All processes that use TensorFlow
            share one copy of them, which the kernel may drop.
    """

    rss: int
    anonymous: int
    shared: int
    files: int


class MemoryWatch:
    """Samples processes until they end, on a thread of its own, within a ``with`` block."""

    def __init__(self, find: Callable[[], Sequence[int]]) -> None:
        """``find`` gives the process ids; it is asked until it gives some."""
        self._find = find
        self._peaks: dict[int, dict[str, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def peaks(self) -> list[Peak]:
        """One of each process, in order of their ids."""
        return [
            Peak(*(self._peaks[pid].get(field, 0) for field in FIELDS))
            for pid in sorted(self._peaks)
        ]

    def _watch(self) -> None:
        pids: Sequence[int] = ()
        while not self._stop.wait(INTERVAL_S):
            pids = pids or self._find()
            for pid in pids:
                try:
                    found = parse_kilobytes(Path(f"/proc/{pid}/status").read_text())
                except (FileNotFoundError, ProcessLookupError):
                    continue
                peak = self._peaks.setdefault(pid, {})
                for field in FIELDS:
                    peak[field] = max(peak.get(field, 0), found.get(field, 0))
