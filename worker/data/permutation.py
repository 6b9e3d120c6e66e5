"""The seeded order of an epoch's records.

Built from the raw output of PCG64 and not from ``Generator.permutation``: numpy promises that raw
bits stay as they are in every version and on every machine, and promises no such thing of
``Generator``. Two workers with different numpy must agree, or records would be lost and doubled.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import numpy as np
import numpy.typing as npt

KEPT_EPOCHS = 2
"""Batches of two epochs are in work at once, at the seam of one and the next."""


def permutation(records: int, *key: int) -> npt.NDArray[np.int64]:
    """``[records]``, a permutation of ``range(records)`` that depends on ``key`` (non-negative
    integers) alone. Every order is equally likely: the records are sorted by random 64-bit keys
    (ties, one in 2^64 pairs, keep their order)."""
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(records)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


class RecordOrder:
    """The permutation of all records of each epoch; keeps the last epochs used. Thread-safe."""

    def __init__(self, records: int) -> None:
        self._records = records
        self._lock = Lock()
        self._epochs: OrderedDict[tuple[int, int], npt.NDArray[np.int64]] = OrderedDict()

    def records_at(self, seed: int, epoch: int, first: int, stop: int) -> npt.NDArray[np.int64]:
        """``[stop - first]``, the records at positions ``[first, stop)`` of ``epoch``; a view."""
        key = (seed, epoch)
        with self._lock:
            if key not in self._epochs:
                self._epochs[key] = permutation(self._records, *key)
                while len(self._epochs) > KEPT_EPOCHS:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(key)
            return self._epochs[key][first:stop]


class BlockOrder:
    """An order for sources that are read front to back: the blocks of ``block_records`` records
    are permuted, and the records within each one. Thread-safe."""

    def __init__(self, records: int, block_records: int) -> None:
        self._records = records
        self._block_records = block_records
        self._count = -(-records // block_records)
        self._blocks = RecordOrder(self._count)

    def range_of(self, block: int) -> tuple[int, int]:
        """The records ``[start, stop)`` of a block; the last one may be short."""
        start = block * self._block_records
        return start, min(start + self._block_records, self._records)

    def pieces(self, seed: int, epoch: int, first: int, stop: int) -> list[tuple[int, int, int]]:
        """Positions ``[first, stop)`` of an epoch as ``(block, low, high)``: places ``[low,
        high)`` of that block once it is shuffled, in rising order of position."""
        blocks = self._blocks.records_at(seed, epoch, 0, self._count)
        sizes = np.full(self._count, self._block_records)
        sizes[blocks == self._count - 1] = self._records - (self._count - 1) * self._block_records
        ends = np.cumsum(sizes)
        found = []
        at = int(np.searchsorted(ends, first, side="right"))
        while first < stop:
            begin, end = int(ends[at] - sizes[at]), int(ends[at])
            found.append((int(blocks[at]), first - begin, min(stop, end) - begin))
            first = end
            at += 1
        return found

    def shuffled(self, seed: int, epoch: int, block: int) -> npt.NDArray[np.int64]:
        """The order of the records within one block, as places counted from its start."""
        start, stop = self.range_of(block)
        return permutation(stop - start, seed, epoch, block)
