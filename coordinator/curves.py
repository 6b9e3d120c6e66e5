"""The curves of a run: a point per step where steps are slow, a thinned-out line where not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coordinator.figures import CAUSES, WorkerTimes
from coordinator.gauges import Gauges
from coordinator.run import Followed
from coordinator.tensorboard import EventWriter

POINTS_PER_FLUSH = 50
"""Points of one curve that are written per second at most; more steps are averaged."""

GAUGES_EVERY_S = 1.0
"""Pause between two points of what is read off the shards and workers, who speak as often."""

HISTOGRAM_EVERY_S = 5.0

MAX_CHARTED = 64
"""Workers that get a curve of their own: the first ones. Each is a chart."""


class Curves:
    """Collects points and writes them when it is told to, about once a second.

    A disk that refuses stops the curves with a warning, not the training. Not thread-safe.
    """

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self._writer = EventWriter(logdir)
        self._steps: list[tuple[int, float, float]] = []
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
        self._steps.append((step, loss, staleness))

    def flush(self, gauges: Gauges) -> None:
        """Writes what was collected since the last time, with ``gauges`` of now."""
        if not self._steps:
            return
        points, self._steps = self._steps, []
        stride = -(-len(points) // POINTS_PER_FLUSH)
        for first in range(0, len(points), stride):
            group = points[first : first + stride]
            losses = [loss for _, loss, _ in group if math.isfinite(loss)]
            if losses:
                self._scalar("train/loss", sum(losses) / len(losses), group[-1][0])
        step = points[-1][0]
        self._scalar("train/staleness", sum(p[2] for p in points) / len(points), step)
        self._scalar("train/steps_per_s", gauges.steps_per_s, step)
        self._scalar("train/examples_per_s", gauges.examples_per_s, step)
        self._new_policies(gauges.policies)
        if gauges.now - self._gauged_at >= GAUGES_EVERY_S:
            self._gauged_at = gauges.now
            self._gauge(gauges, step)
        if gauges.now - self._histogram_at >= HISTOGRAM_EVERY_S:
            self._histogram(gauges, step)
        self._flush()

    def epoch(self, values: Mapping[str, float], step: int) -> None:
        """What is known of an epoch: its mean training loss, or an evaluation's results."""
        for name, value in values.items():
            self._scalar(f"epoch/{name}", value, step)
        self._flush()

    def close(self) -> None:
        """Writes the rest; may be called twice."""
        self._try(self._writer.close)

    def _new_policies(self, policies: Sequence[Followed]) -> None:
        for policy in policies[self._policies :]:
            words = f"policy {policy.number} from global step {policy.step}: `{policy.settings}`"
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
