"""Second attempts of micro-batches that somebody is slow with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from coordinator.micro_batch import MicroBatch

RECENT = 64
"""Attempts that say how long one takes."""


class Speculation:
    """Knows how long attempts take, from lease to commit, and so who is late. Not thread-safe."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=RECENT)

    def measure(self, took_s: float) -> None:
        """An attempt was committed, the first of its micro-batch."""
        self._took_s.append(took_s)

    def second(self, micros: Iterable[MicroBatch]) -> tuple[MicroBatch, float] | None:
        """The micro-batch of which a worker that has nothing else to do should make a second
        attempt, and from when on: the one that was held longest, once that is longer than half
        of the attempts took. None if there is none, or nothing was measured yet."""
        late = [micro for micro in micros if micro.may_be_doubled]
        if not late or not self._took_s:
            return None
        oldest = min(late, key=lambda micro: micro.since)
        return oldest, oldest.since + median(self._took_s)
