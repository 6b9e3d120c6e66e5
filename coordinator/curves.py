"""The scalars of a run: a point per step where steps are slow, a thinned-out line where not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from coordinator.tensorboard import ScalarWriter

POINTS_PER_FLUSH = 50
"""Points of one curve that are written per second at most; more steps are averaged."""


class Curves:
    """Collects points and writes them when it is told to, about once a second.

    A disk that refuses stops the curves with a warning, not the training. Not thread-safe.
    """

    def __init__(self, logdir: Path) -> None:
        self._logdir = logdir
        self._writer = ScalarWriter(logdir)
        self._steps: list[tuple[int, float, float]] = []
        self._broken = False
        self.warnings: list[str] = []

    def step(self, step: int, loss: float, staleness: float) -> None:
        """A global step is done."""
        self._steps.append((step, loss, staleness))

    def flush(self, steps_per_s: float, examples_per_s: float) -> None:
        """Writes what was collected since the last time, with the rates of now."""
        if not self._steps:
            return
        points, self._steps = self._steps, []
        stride = -(-len(points) // POINTS_PER_FLUSH)
        for first in range(0, len(points), stride):
            group = points[first : first + stride]
            losses = [loss for _, loss, _ in group if math.isfinite(loss)]
            if losses:
                self._write("train/loss", sum(losses) / len(losses), group[-1][0])
        step = points[-1][0]
        self._write("train/staleness", sum(p[2] for p in points) / len(points), step)
        self._write("train/steps_per_s", steps_per_s, step)
        self._write("train/examples_per_s", examples_per_s, step)
        self._flush()

    def epoch(self, values: Mapping[str, float], step: int) -> None:
        """What is known of an epoch: its mean training loss, or an evaluation's results."""
        for name, value in values.items():
            self._write(f"epoch/{name}", value, step)
        self._flush()

    def close(self) -> None:
        """Writes the rest; may be called twice."""
        if not self._broken:
            try:
                self._writer.close()
            except OSError as error:
                self._give_up(error)

    def _write(self, tag: str, value: float, step: int) -> None:
        if self._broken:
            return
        try:
            self._writer.scalar(tag, value, step)
        except OSError as error:
            self._give_up(error)

    def _flush(self) -> None:
        if not self._broken:
            try:
                self._writer.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        self.warnings.append(f"no more TensorBoard scalars in {self._logdir}: {error}")
