"""The curves of a run: a point per step where steps are slow, a thinned-out line where not.

Curves thin out as their files grow: with every :data:`LEVEL_NBYTES` that the event files of a run
have, half as many points may come in a second. If they may take r bytes a second at first, files
have at most LEVEL_NBYTES * (1 + log2(1 + r t / LEVEL_NBYTES)) bytes after t seconds. The greatest r
is 11 kB/s, with 64 workers: 36 MiB after a day, 69 MiB after a year, 83 MiB after ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from coordinator.core.figures import CAUSES, WorkerTimes
from coordinator.core.run import Followed
from coordinator.records.tensorboard import EventWriter

POINTS_PER_FLUSH = 50
"""Points of one curve that are written per second at most; more steps are averaged."""

GAUGES_EVERY_S = 1.0
"""Pause between two points of what is read off the shards and workers, who speak as often."""

HISTOGRAM_EVERY_S = 5.0

LEVEL_NBYTES = 4 << 20
"""So much more of event files doubles all pauses."""

FLUSH_EVERY_S = 0.5
"""Pause between two points, once it counts: about how often the coordinator writes anyway."""

LONGEST_FACTOR = 1 << 18
"""Pauses are not doubled any more: points come every 36 hours."""

MOST_STEPS = 4096
"""Steps that are held one by one until they are written; of more, every two become one."""

MAX_CHARTED = 64
"""Workers that get a curve of their own: the first ones. Each is a chart."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """One moment of a job. All counts are so far; those of shards and workers are of the processes
    that are there. ``times`` and ``speeds`` (examples/s) are by active worker, ``counts`` by what
    they count. ``policies`` are those that were followed, with the first."""

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
    """Steps in a row, up to ``step``: how many, the sum of their staleness, and of those losses
    that are finite."""

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
    """Collects points and writes them when it is told to, less and less often.

    A disk that refuses stops the curves with a warning, not the training. Not thread-safe.
    """

    def __init__(self, logdir: Path, level_nbytes: int = LEVEL_NBYTES) -> None:
        self._logdir = logdir
        self._level_nbytes = level_nbytes
        self._writer = EventWriter(logdir)
        self._steps: list[_Steps] = []
        self._epochs: dict[str, tuple[float, int]] = {}
        """The newest point of each curve that is held back."""
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
        """A global step is done."""
        finite = math.isfinite(loss)
        self._steps.append(_Steps(step, 1, staleness, int(finite), loss if finite else 0.0))
        if len(self._steps) == MOST_STEPS:
            pairs = range(0, MOST_STEPS, 2)
            self._steps = [_Steps.sum_of(self._steps[first : first + 2]) for first in pairs]

    def flush(self, gauges: Gauges) -> None:
        """Writes what was collected since the last time, with ``gauges`` of now, if it is time to.
        Call it about twice a second."""
        self._now, factor = gauges.now, self._factor
        if self._epochs and self._now - self._epoch_at >= FLUSH_EVERY_S * factor:
            self._write_epochs()
        if not self._steps:
            return
        # Not held back before it counts: a caller that is a little early would write half as often.
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
        self._flush()

    def epoch(self, values: Mapping[str, float], step: int) -> None:
        """What is known of an epoch: its mean training loss, or an evaluation's results. Where
        epochs come faster than points, the newest is written."""
        self._epochs |= {name: (value, step) for name, value in values.items()}
        if self._factor == 1:
            self._write_epochs()

    def close(self) -> None:
        """Writes the rest; may be called twice."""
        if self._epochs:
            self._write_epochs()
        if self._steps:
            self._write_steps()
        self._try(self._writer.close)

    @property
    def _factor(self) -> int:
        """By which pauses are longer than at first."""
        return min(1 << min(self._writer.nbytes // self._level_nbytes, 64), LONGEST_FACTOR)

    def _write_steps(self) -> int:
        """Writes what was collected of steps; the last of them."""
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
        self._flush()

    def _new_policies(self, policies: Sequence[Followed]) -> None:
        for policy in policies[self._policies :]:
            words = f"policy {policy.number} from global step {policy.step}: `{policy.words}`"
            self._text("policy", words, policy.step)
        self._policies = len(policies)

    def _gauge(self, gauges: Gauges, step: int) -> None:
        self._scalar("shards/version_skew", gauges.version_skew, step)
        for name, count in gauges.counts.items():
            # A policy under which it cannot happen needs no chart of it.
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
        """The pushes since the last one."""
        before = self._staleness + (0,) * (len(gauges.staleness_counts) - len(self._staleness))
        new = [now - then for now, then in zip(gauges.staleness_counts, before, strict=False)]
        self._staleness = gauges.staleness_counts
        # A shard that was restarted counts anew, so this once the difference says nothing.
        if any(new) and min(new) >= 0:
            self._histogram_at = gauges.now
            self._try(lambda: self._writer.histogram("train/staleness_counts", new, step))

    def _text(self, tag: str, text: str, step: int) -> None:
        self._try(lambda: self._writer.text(tag, text, step))

    def _scalar(self, tag: str, value: float, step: int) -> None:
        self._try(lambda: self._writer.scalar(tag, value, step))

    def _flush(self) -> None:
        self._try(self._writer.flush)

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
    """Where the workers' time went since ``before``, as parts of the whole by cause: the mean over
    those that say so. Empty when nobody does."""
    shares = [times.since(before.get(name, WorkerTimes())).shares() for name, times in now.items()]
    told = [share for share in shares if share]
    return {cause: sum(s[cause] for s in told) / len(told) for cause in CAUSES} if told else {}
