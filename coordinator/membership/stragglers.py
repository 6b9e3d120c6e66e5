"""Finds slow workers: each one's computing time per example, against that of the others.

Only computing counts. The time between two batches says nothing under a barrier, where every worker
is as slow as the slowest. Pure: time is passed in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

HALF_LIFE_S = 30.0
"""Age at which a measurement counts half."""

LEAST_BATCHES = 3
"""Batches after which a worker's pace is known. The first is not counted, since TensorFlow traces
and compiles in it."""

LEAST_S = 5.0
"""Least time of observation: when all processes start at once, chance decides which gets the
processor first."""

NAMED_FROM = 1.5
"""Multiple of the median from which on a worker is a straggler."""

MOST_NAMED = 8


class ComputePace:
    """A worker's recent computing time per example. Not thread-safe."""

    def __init__(self) -> None:
        self._looked: tuple[float, int, float] | None = None
        self._seconds = 0.0
        self._examples = 0.0
        self._first = (0, 0.0)
        self._batches = 0
        self._watched_s = 0.0

    def look(self, compute_s: float, examples: int, batches: int, now: float) -> None:
        """Records that the worker has computed for ``compute_s`` seconds in total, and finished
        ``batches`` of ``examples`` in total. Fewer seconds than before mean another process."""
        if batches == 0:
            return
        before_s, before, then = self._looked or (math.inf, 0, now)
        if compute_s < before_s:
            self._looked = (compute_s, examples, now)
            self._first = (batches, now)
        elif examples > before:
            # Otherwise the worker is inside a batch; its time counts once the batch is finished.
            fade = 0.5 ** ((now - then) / HALF_LIFE_S)
            self._seconds = self._seconds * fade + compute_s - before_s
            self._examples = self._examples * fade + examples - before
            self._looked = (compute_s, examples, now)
            self._batches = batches - self._first[0]
            self._watched_s = now - self._first[1]

    @property
    def s_per_example(self) -> float | None:
        """Computing seconds per example; None while too little is known."""
        known = self._batches >= LEAST_BATCHES and self._watched_s >= LEAST_S
        return self._seconds / self._examples if known else None


def slowness(paces: Mapping[str, float | None]) -> dict[str, float]:
    """Divides each pace (seconds per example, None if unknown) by the median of all.

    Of two middle paces the faster one is taken as the median, so that of two workers the slower one
    stands out. Empty with fewer than two.
    """
    known = {name: pace for name, pace in paces.items() if pace}
    if len(known) < 2:
        return {}
    median = statistics.median_low(known.values())
    return {name: pace / median for name, pace in known.items()}


def name_stragglers(ratios: Mapping[str, float]) -> list[str]:
    """Returns a line on each worker that is much slower than the median, the slowest first."""
    slow = sorted(((r, name) for name, r in ratios.items() if r >= NAMED_FROM), reverse=True)
    return [
        f"{name} takes {ratio:.1f} times as long per example as the median"
        for ratio, name in slow[:MOST_NAMED]
    ]
