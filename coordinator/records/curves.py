"""The curves of a run: a point per step where steps are slow, a thinned-out line elsewhere.

Curves thin out as their files grow: each :data:`LEVEL_NBYTES` of a run's event files halves the
rate of points. At an initial r bytes a second, files have at most
LEVEL_NBYTES * (1 + log2(1 + r t / LEVEL_NBYTES)) bytes after t seconds. The greatest r is 11 kB/s,
with 64 workers: 36 MiB after a day, 69 MiB after a year, 83 MiB after ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from coordinator.core.figures import CAUSES, WorkerTimes
from coordinator.core.run import Followed

POINTS_PER_FLUSH = 50
"""Most points of one curve that are written per second; more steps are averaged."""

GAUGES_EVERY_S = 1.0
"""Pause between two points of the figures of shards and workers, which report as often."""

HISTOGRAM_EVERY_S = 5.0

LEVEL_NBYTES = 4 << 20
"""Growth of event files that doubles all pauses."""

FLUSH_EVERY_S = 0.5
"""Pause between two points, times the factor once that exceeds 1: about the interval at which the
coordinator writes anyway."""

LONGEST_FACTOR = 1 << 18
"""Limit of the pauses' factor: points come every 36 hours."""

MOST_STEPS = 4096
"""Steps that are buffered one by one; beyond that, every two are merged."""

MAX_CHARTED = 64
"""Workers that get a chart of their own, the first ones."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The figures of a job at one moment. Counts are totals; those of shards and workers cover the
    present processes. ``times`` and ``speeds`` (examples/s) are by active worker, ``counts`` by
    name. ``policies`` are all so far, including the first."""

    now: float
    steps_per_s: float = 0.0
    examples_per_s: float = 0.0
    version_skew: int = 0
    staleness_counts: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    times: Mapping[str, WorkerTimes] = field(default_factory=lambda: MappingProxyType({}))
    speeds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    policies: tuple[Followed, ...] = ()


@dataclass(frozen=True, slots=True)
class _Steps:
    """Consecutive steps up to ``step``: their number, the sum of their staleness, and the number
    and sum of their finite losses."""

    step: int
    steps: int
    staleness: float
    losses: int
    loss: float

    @staticmethod
    def sum_of(parts: Sequence[_Steps]) -> _Steps:
        return _Steps(
            parts[-1].step,
            sum(part.steps for part in parts),
            sum(part.staleness for part in parts),
            sum(part.losses for part in parts),
            sum(part.loss for part in parts),
        )


class Curves:
    """Collects points and writes them on request, ever less often.

    A disk error stops the curves with a warning, not the training. Not thread-safe.
    """

    def __init__(self, logdir: Path, level_nbytes: int = LEVEL_NBYTES) -> None:
        self._logdir = logdir
        self._level_nbytes = level_nbytes
        # Imported only here: it takes long, and commands that only show figures do not need it.
        from coordinator.records.tensorboard import EventWriter

        self._writer = EventWriter(logdir)
        self._steps: list[_Steps] = []
        self._epochs: dict[str, tuple[float, int]] = {}
        """The newest unwritten point of each curve."""
        self._now = -math.inf
        self._flushed_at = -math.inf
        self._epoch_at = -math.inf
        self._broken = False
        self.warnings: list[str] = []
        self._gauged_at = -math.inf
        self._histogram_at = -math.inf
        self._staleness: tuple[int, ...] = ()
        self._times: Mapping[str, WorkerTimes] = {}
        self._charted: set[str] = set()
        self._policies = 0

    def step(self, step: int, loss: float, staleness: float) -> None:
        """Adds the point of a global step."""
        finite = math.isfinite(loss)
        self._steps.append(_Steps(step, 1, staleness, int(finite), loss if finite else 0.0))
        if len(self._steps) == MOST_STEPS:
            pairs = range(0, MOST_STEPS, 2)
            self._steps = [_Steps.sum_of(self._steps[first : first + 2]) for first in pairs]

    def flush(self, gauges: Gauges) -> None:
        """Writes the points collected since the last time, if it is time, with the present
        ``gauges``. Call it about twice a second."""
        self._now, factor = gauges.now, self._factor
        if self._epochs and self._now - self._epoch_at >= FLUSH_EVERY_S * factor:
            self._write_epochs()
        if not self._steps:
            return
        # No pause at factor 1: with one, a caller that is a little early would write half as often.
        if factor > 1 and self._now - self._flushed_at < FLUSH_EVERY_S * factor:
            return
        self._flushed_at = self._now
        step = self._write_steps()
        self._scalar("train/steps_per_s", gauges.steps_per_s, step)
        self._scalar("train/examples_per_s", gauges.examples_per_s, step)
        self._new_policies(gauges.policies)
        if gauges.now - self._gauged_at >= GAUGES_EVERY_S * factor:
            self._gauged_at = gauges.now
            self._gauge(gauges, step)
        if gauges.now - self._histogram_at >= HISTOGRAM_EVERY_S * factor:
            self._histogram(gauges, step)
        self._try(self._writer.flush)

    def epoch(self, values: Mapping[str, float], step: int) -> None:
        """Adds an epoch's mean training loss or an evaluation's results. If epochs come faster than
        points are written, only the newest is written."""
        self._epochs |= {name: (value, step) for name, value in values.items()}
        if self._factor == 1:
            self._write_epochs()

    def close(self) -> None:
        """Writes the points collected so far and closes the file; may be called twice."""
        if self._epochs:
            self._write_epochs()
        if self._steps:
            self._write_steps()
        self._try(self._writer.close)

    @property
    def _factor(self) -> int:
        """The factor by which pauses have grown."""
        return min(1 << min(self._writer.nbytes // self._level_nbytes, 64), LONGEST_FACTOR)

    def _write_steps(self) -> int:
        """Writes the collected steps; returns the last of them."""
        points, self._steps = self._steps, []
        stride = -(-len(points) // POINTS_PER_FLUSH)
        for first in range(0, len(points), stride):
            group = _Steps.sum_of(points[first : first + stride])
            if group.losses:
                self._scalar("train/loss", group.loss / group.losses, group.step)
        whole = _Steps.sum_of(points)
        self._scalar("train/staleness", whole.staleness / whole.steps, whole.step)
        return whole.step

    def _write_epochs(self) -> None:
        self._epoch_at = self._now
        epochs, self._epochs = self._epochs, {}
        for name, (value, step) in epochs.items():
            self._scalar(f"epoch/{name}", value, step)
        self._try(self._writer.flush)

    def _new_policies(self, policies: Sequence[Followed]) -> None:
        for policy in policies:
            if policy.number > self._policies:
                words = f"policy {policy.number} from global step {policy.step}: `{policy.words}`"
                self._text("policy", words, policy.step)
                self._policies = policy.number

    def _gauge(self, gauges: Gauges, step: int) -> None:
        self._scalar("shards/version_skew", gauges.version_skew, step)
        for name, count in gauges.counts.items():
            # A count that the policy cannot raise needs no chart.
            if count:
                self._scalar(f"counts/{name}", count, step)
        for name, speed in gauges.speeds.items():
            if len(self._charted) < MAX_CHARTED:
                self._charted.add(name)
            if name in self._charted:
                self._scalar(f"examples_per_s/{name}", speed, step)
        shares = _mean_shares(self._times, gauges.times)
        for cause, share in shares.items():
            self._scalar(f"time_share/{cause}", share, step)
        if shares:
            self._times = gauges.times

    def _histogram(self, gauges: Gauges, step: int) -> None:
        """Writes the pushes since the last histogram."""
        before = self._staleness + (0,) * (len(gauges.staleness_counts) - len(self._staleness))
        new = [now - then for now, then in zip(gauges.staleness_counts, before, strict=False)]
        self._staleness = gauges.staleness_counts
        # A restarted shard counts from 0, which makes this one difference useless.
        if any(new) and min(new) >= 0:
            self._histogram_at = gauges.now
            self._try(lambda: self._writer.histogram("train/staleness_counts", new, step))

    def _text(self, tag: str, text: str, step: int) -> None:
        self._try(lambda: self._writer.text(tag, text, step))

    def _scalar(self, tag: str, value: float, step: int) -> None:
        self._try(lambda: self._writer.scalar(tag, value, step))

    def _try(self, write: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            write()
        except OSError as error:
            self._broken = True
            self.warnings.append(f"no more TensorBoard curves in {self._logdir}: {error}")


def _mean_shares(
    before: Mapping[str, WorkerTimes], now: Mapping[str, WorkerTimes]
) -> dict[str, float]:
    """Returns the fractions of the workers' time since ``before`` by cause: the mean over the
    workers that report any. Empty if none does."""
    shares = [times.since(before.get(name, WorkerTimes())).shares() for name, times in now.items()]
    known = [share for share in shares if share]
    return {cause: sum(s[cause] for s in known) / len(known) for cause in CAUSES} if known else {}
