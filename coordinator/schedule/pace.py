"""How fast workers are, as last measured, and how much each is leased at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

from psrpc.core.batch import BatchId

TASK_S = 0.5
"""Seconds of work in a lease: long enough to hide the round trip, short enough that losing one
costs little."""

LEASES_PER_S = 250.0
"""Most leases per second that all workers together ask for; to stay below it, many workers get
longer tasks. Half of what a coordinator on a slow core gives besides answering heartbeats: if it
gave fewer than this, workers would wait for leases, which counts as slowness, and would get shorter
tasks, that is, ask more often."""

LARGEST_TASK = 256
"""Most batches of one lease."""

MEMORY = 0.5
"""Weight of the newest measurement in a worker's rate."""


@dataclass(slots=True)
class Pace:
    """Measures a worker's speed in its tasks, to size the next one."""

    task_size: int = 1
    batch_s: float | None = None
    since: float | None = None

    def measure(self, batches: int, now: float) -> None:
        """Notes that ``batches`` were done since the last call, or since ``since``."""
        if self.since is not None and now > self.since:
            self.batch_s = _blend(self.batch_s, (now - self.since) / batches)
        self.since = now

    def next_size(self, workers: int) -> int:
        """Returns the number of batches of the next task of one of ``workers`` workers."""
        if self.batch_s is not None:
            task_s = max(TASK_S, workers / LEASES_PER_S)
            wanted = round(task_s / self.batch_s) if self.batch_s > 0 else LARGEST_TASK
            # At most doubled, so that one lucky measurement does not lease a minute of work.
            self.task_size = max(1, min(wanted, 2 * self.task_size, LARGEST_TASK))
        return self.task_size


@dataclass(slots=True)
class LeaseHolder:
    """A worker's leases: batch to attempt, in lease order."""

    leases: dict[BatchId, int] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)

    def task_size(self, workers: int, left: int, devices: int) -> int:
        """Returns the number of batches of its next task, of ``left`` ones that ``workers`` share:
        a multiple of its ``devices``, which compute at once."""
        size = min(self.pace.next_size(workers), max(1, left // (2 * max(1, workers))))
        return -(-size // devices) * devices

    def expected(self, now: float) -> int:
        """Estimates how many of its batches the worker has done and not reported."""
        batch_s, since = self.pace.batch_s, self.pace.since
        if batch_s is None or since is None:
            return 0
        return min(len(self.leases), int((now - since) / batch_s)) if batch_s > 0 else 0


@dataclass(slots=True)
class Speeds:
    """Records per second of each worker, from lease to commit: of one of its devices."""

    _known: dict[str, float] = field(default_factory=dict)

    def measure(self, worker: str, records: int, took_s: float) -> None:
        """Notes that ``worker`` has computed a micro-batch."""
        if took_s > 0:
            self._known[worker] = _blend(self._known.get(worker), records / took_s)

    def measure_unfinished(self, worker: str, records: int, took_s: float) -> None:
        """Notes that ``worker`` gave up a micro-batch ``took_s`` after its lease: it needs longer
        than that, if it began at once. A known slower speed stays."""
        expected_s = self.expected_s(worker, records)
        if expected_s is None or took_s > expected_s:
            self.measure(worker, records, took_s)

    def expected_s(self, worker: str, records: int) -> float | None:
        """Estimates the seconds that ``worker`` needs for a micro-batch. A worker of unknown speed
        counts as the median one; None if no speed is known."""
        if not self._known:
            return None
        return records / self._known.get(worker, median(self._known.values()))

    def ratio(self, worker: str, devices: Callable[[str], int]) -> float | None:
        """Returns the speed of a device of ``worker`` over the mean of all devices of workers whose
        speed is known, or None. ``devices`` says how many a worker has."""
        speed = self._known.get(worker)
        if speed is None:
            return None
        return speed / fmean(self._known.values(), weights=map(devices, self._known))

    def forget(self, worker: str) -> None:
        """Forgets a departed ``worker``."""
        self._known.pop(worker, None)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else MEMORY * new + (1 - MEMORY) * old
