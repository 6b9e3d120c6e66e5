"""Micro-batches as large as their workers are fast, in rounds of as many records as ever.

A worker that is r times as fast as the mean gets r times as many records, so that all are done at
the same time. The shards weigh each gradient by its examples, so the mean of the round stays the
mean over its records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from psrpc.batch import BatchId

STEPS = 8
"""Sizes are multiples of a batch divided by this, so that few sizes are ever compiled."""

LARGEST = 2
"""Batches in one cut at most: a worker's memory has to hold it."""


def cut_size(
    *, piece: int, pieces: int, left: int, slots: int, batch_size: int, ratio: float | None
) -> int:
    """Records of the next cut of a round, [1, ``piece``].

    Args:
        piece: records up to the next gap; no cut goes over one.
        pieces: how many runs without a gap are left, the present one included.
        left: records of the round that are not cut yet.
        slots: cuts that may still be made; at least ``pieces``.
        batch_size: B, records of a micro-batch of the ordinary size.
        ratio: the worker's speed over the mean speed; None if it is unknown.
    """
    assert 0 < piece <= left
    assert 0 < pieces <= slots
    if slots == pieces:
        return piece
    unit = max(1, batch_size // STEPS)
    largest = LARGEST * batch_size // unit * unit
    # The cuts to come cannot take more than the largest each.
    least = unit * max(1, -(-left // unit) - (slots - 1) * largest // unit)
    if ratio is None:
        return min(piece, max(least, batch_size))
    # What is left is shared among the cuts that are left, so that errors do not add up.
    wanted = unit * round(left / slots * ratio / unit)
    return min(piece, max(least, min(largest, wanted)))


class Uncut:
    """The records of a round that are not cut yet. Not thread-safe."""

    def __init__(self, batches: Iterable[BatchId], batch_size: int) -> None:
        """``batches`` of one epoch in rising order; there will be no more cuts than these."""
        self._batch_size = batch_size
        self._runs: deque[tuple[int, int]] = deque()
        self._slots = 0
        self._epoch = 0
        for batch in batches:
            self._slots += 1
            self._epoch = batch.epoch
            start, stop = batch.first, batch.first + batch.count
            if self._runs and self._runs[-1][1] == start:
                start = self._runs.pop()[0]
            self._runs.append((start, stop))

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return bool(self._runs)

    def cut(self, ratio: float | None) -> BatchId:
        """The next cut, for a worker of this ``ratio``."""
        start, stop = self._runs.popleft()
        size = cut_size(
            piece=stop - start,
            pieces=len(self._runs) + 1,
            left=stop - start + sum(stop - start for start, stop in self._runs),
            slots=self._slots,
            batch_size=self._batch_size,
            ratio=ratio,
        )
        self._slots -= 1
        if start + size < stop:
            self._runs.appendleft((start + size, stop))
        return BatchId(self._epoch, start, size)
