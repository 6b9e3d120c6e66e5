"""Micro-batches of different sizes: a round is cut on demand, by the speed of workers. Pure.

With ``balance`` a worker that is r times as fast as the mean gets r times as many records, so that
all finish at the same time. The shards weigh each gradient by its examples, so the mean of the
round stays the mean over its records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from psrpc.core.batch import BatchId

STEPS = 8
"""Sizes are multiples of a batch's size divided by this, so that few sizes are compiled."""

LARGEST = 2
"""Most batches in one cut, which must fit into a worker's memory."""


def cut_size(
    *, piece: int, pieces: int, left: int, slots: int, batch_size: int, wanted: float
) -> int:
    """Returns the records of the next cut of a round, [1, ``piece``].

    Args:
        piece: records up to the next gap; a cut never crosses one.
        pieces: runs without a gap that are left, including the present one.
        left: records of the round that are not cut yet.
        slots: cuts that may still be made; at least ``pieces``.
        batch_size: B, records of an ordinary micro-batch.
        wanted: the desired number of records.
    """
    assert 0 < piece <= left
    assert 0 < pieces <= slots
    if slots == pieces:
        return piece
    unit = max(1, batch_size // STEPS)
    largest = LARGEST * batch_size // unit * unit
    # The later cuts cannot take more than the largest size each.
    least = unit * max(1, -(-left // unit) - (slots - 1) * largest // unit)
    # An ordinary batch may be no multiple of the unit.
    size = batch_size if wanted == batch_size else unit * round(wanted / unit)
    return min(piece, max(least, min(largest, size)))


class Uncut:
    """The uncut records of a round. Not thread-safe."""

    def __init__(self, batches: Iterable[BatchId], batch_size: int) -> None:
        """``batches`` are of one epoch, in rising order; there are no more cuts than batches."""
        self._batch_size = batch_size
        self._runs: deque[tuple[int, int]] = deque()
        self._slots = 0
        self._epoch = 0
        self._records = 0
        for batch in batches:
            self._slots += 1
            self._epoch = batch.epoch
            start, stop = batch.first, batch.first + batch.count
            if self._runs and self._runs[-1][1] == start:
                start = self._runs.pop()[0]
            self._runs.append((start, stop))
            self._records += batch.count
        self._mean = self._records / max(1, self._slots)

    def __bool__(self) -> bool:
        """Whether any records are left."""
        return bool(self._runs)

    def cut(self, ratio: float | None) -> BatchId:
        """Returns the next cut, for a worker ``ratio`` times as fast as the mean, or of unknown
        speed (None), which gets the mean."""
        start, stop = self._runs.popleft()
        size = cut_size(
            piece=stop - start,
            pieces=len(self._runs) + 1,
            left=self._records,
            slots=self._slots,
            batch_size=self._batch_size,
            wanted=self._mean * (1.0 if ratio is None else ratio),
        )
        self._slots -= 1
        self._records -= size
        if start + size < stop:
            self._runs.appendleft((start + size, stop))
        return BatchId(self._epoch, start, size)
