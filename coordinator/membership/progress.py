"""Counters and rates of a run: for its status, its summary and its curves.

Pure: time is passed in, and nothing locks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.core.work import Report
from coordinator.membership.stragglers import ComputePace
from psrpc.core.shard_reports import MAX_WORKERS

RATE_WINDOW_S = 10.0
_BUCKET_S = 0.5
_TOLD = 64
"""Totals that a meter keeps; about one arrives per second."""


class Meter:
    """Events per second over the last ten seconds."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[float, float]] = deque()
        self._since: float | None = None

    def add(self, amount: float, now: float) -> None:
        """Adds ``amount`` events at ``now``."""
        if self._since is None:
            self._since = now
        if self._buckets and now - self._buckets[-1][0] < _BUCKET_S:
            start, old = self._buckets[-1]
            self._buckets[-1] = (start, old + amount)
        else:
            self._buckets.append((now, amount))

    def rate(self, now: float) -> float:
        """Returns events per second; 0 before there are enough."""
        while self._buckets and now - self._buckets[0][0] > RATE_WINDOW_S:
            self._buckets.popleft()
        if not self._buckets or self._since is None:
            return 0.0
        span = min(RATE_WINDOW_S, now - self._since)
        return sum(amount for _, amount in self._buckets) / span if span >= _BUCKET_S else 0.0


class TotalsMeter:
    """Rates of periodically reported totals, over the last ten seconds.

    Each is the growth from the first total of that time to the newest. Totals that shrink come from
    a new process, which counts from zero, and clear the earlier ones.
    """

    def __init__(self) -> None:
        self._told: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=_TOLD)

    def clear(self) -> None:
        """Forgets the totals; later ones are of something else."""
        self._told.clear()

    def tell(self, now: float, *totals: int) -> None:
        """Adds the totals at ``now``."""
        if self._told and any(b < a for a, b in zip(self._told[-1][1], totals, strict=True)):
            self.clear()
        self._told.append((now, totals))
        # The first may be one interval older, so that ten seconds are covered.
        while len(self._told) > 2 and now - self._told[1][0] >= RATE_WINDOW_S:
            self._told.popleft()

    def rates(self) -> tuple[float, ...] | None:
        """Returns events per second for each total; None before there are enough."""
        if not self._told or self._told[-1][0] <= self._told[0][0]:
            return None
        (then, before), (now, totals) = self._told[0], self._told[-1]
        return tuple([(b - a) / (now - then) for a, b in zip(before, totals, strict=True)])


@dataclass(slots=True)
class WorkerProgress:
    """The work of one worker. ``batches`` and ``examples`` are the work that counted; ``attempts``
    and ``computed`` include work in vain."""

    batches: int = 0
    examples: int = 0
    attempts: int = 0
    computed: int = 0
    gone: bool = False
    began: float | None = None
    last_done: float = 0.0
    batch_rate: Meter = field(default_factory=Meter)
    records: Meter = field(default_factory=Meter)
    pace: ComputePace = field(default_factory=ComputePace)

    @property
    def mean_examples_per_s(self) -> float:
        """Mean rate since its first lease; 0 before its first batch."""
        span = self.last_done - self.began if self.began is not None else 0.0
        return self.examples / span if span > 0 else 0.0

    def compute(self, examples: int) -> None:
        """Notes that it has computed a batch, whether or not that counts."""
        self.attempts += 1
        self.computed += examples


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        self.total += value * weight
        self.weight += weight

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


class Progress:
    """Counts the work of this run of the job. ``skipped`` starts from the count of an earlier run;
    ``batches`` and ``examples`` are this run's alone, since rates are computed from them.
    ``failed`` counts batches whose worker was lost; others repeat them. ``contributors`` counts the
    workers that have done a batch; ``workers`` has the present ones and the newest departed ones,
    ``MAX_WORKERS`` together unless more are present."""

    def __init__(self, skipped: int = 0) -> None:
        self.batches = 0
        self.examples = 0
        self.skipped = skipped
        self.steps_done = 0
        """Global steps."""
        self.failed = 0
        self.began: float | None = None
        self.last_done: float | None = None
        self.workers: dict[str, WorkerProgress] = {}
        self.contributors = 0
        self.version_skew = 0
        """The greatest skew seen between shards."""
        self.steps = Meter()
        self.batch_rate = Meter()
        self.records = Meter()
        self._staleness = _Mean()
        self._epochs: dict[int, _Mean] = {}

    @property
    def mean_staleness(self) -> float:
        """Mean over all applied batches; 0 before the first."""
        return self._staleness.value if self._staleness.weight else 0.0

    @property
    def train_s(self) -> float:
        """Seconds from the first training lease to the last batch done."""
        if self.began is None or self.last_done is None:
            return 0.0
        return self.last_done - self.began

    def leased(self, worker: str, now: float) -> None:
        """Notes a training lease."""
        mine = self._worker(worker)
        if mine.began is None:
            mine.began = now
        if self.began is None:
            self.began = now

    def done(self, worker: str, report: Report, now: float) -> None:
        """Counts a finished batch."""
        self.batches += 1
        self.last_done = now
        mine = self._worker(worker)
        self.contributors += not mine.batches
        mine.batches += 1
        mine.last_done = now
        mine.compute(report.batch.count)
        mine.batch_rate.add(1, now)
        self.batch_rate.add(1, now)
        if report.skipped:
            self.skipped += 1
            return
        count = report.batch.count
        self.examples += count
        mine.examples += count
        mine.records.add(count, now)
        self.records.add(count, now)
        self._staleness.add(report.staleness, 1)
        if math.isfinite(report.loss):
            self._epochs.setdefault(report.batch.epoch, _Mean()).add(report.loss, count)

    def stepped(self, steps: int, now: float) -> None:
        """Counts global steps."""
        self.steps_done += steps
        self.steps.add(steps, now)

    def in_vain(self, worker: str, report: Report) -> None:
        """Notes a batch that does not count: another attempt came first, or its gradient was too
        stale."""
        self._worker(worker).compute(report.batch.count)

    def beat(self, worker: str, compute_s: float, now: float) -> None:
        """Records a worker's total of computing seconds."""
        mine = self.workers.get(worker)
        if mine is not None:
            mine.pace.look(compute_s, mine.computed, mine.attempts, now)

    def speeds(self) -> dict[str, float]:
        """Returns the examples per second of computing time of each worker whose pace is known."""
        paces = {name: worker.pace.s_per_example for name, worker in self.workers.items()}
        return {name: 1 / pace for name, pace in paces.items() if pace}

    def left(self, worker: str) -> None:
        """Notes that a worker is gone for good."""
        mine = self.workers.pop(worker, None)
        if mine is None:
            return
        mine.gone = True
        # Moved to the end, so that departed workers are in the order of leaving.
        self.workers[worker] = mine
        gone = [name for name, other in self.workers.items() if other.gone]
        for name in gone[: max(0, len(self.workers) - MAX_WORKERS)]:
            del self.workers[name]

    def saw_skew(self, skew: int) -> None:
        """Records a version skew of the shards."""
        self.version_skew = max(self.version_skew, skew)

    def _worker(self, name: str) -> WorkerProgress:
        return self.workers.setdefault(name, WorkerProgress())

    def epoch_loss(self, epoch: int) -> float:
        """Returns and forgets the mean training loss of a finished epoch; NaN if there was none."""
        return self._epochs.pop(epoch, _Mean()).value


def mean_loss(reports: Iterable[Report]) -> float:
    """Returns the mean loss over the examples of a round that took part; NaN if none did."""
    mean = _Mean()
    for report in reports:
        if not report.skipped:
            mean.add(report.loss, report.batch.count)
    return mean.value
