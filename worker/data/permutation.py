"""The seeded order of an epoch's records, and the seeds of a batch.

The order uses the raw output of PCG64, not ``Generator.permutation``: numpy promises stable raw
bits for every version and machine, but not a stable ``Generator``. Workers with different numpy
versions must agree, or an epoch would lose some records and repeat others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt

from psrpc.core.batch import BatchId

KEPT_EPOCHS = 2
"""Epochs whose orders are kept: around the end of one, workers compute batches of two."""


def permutation(records: int, *key: int) -> npt.NDArray[np.int64]:
    """Returns ``[records]``, a permutation of ``range(records)`` that depends on ``key``
    (non-negative integers) alone. Sorts the records by random 64-bit keys, so every order is
    equally likely (ties, one in 2^64 pairs, keep their order)."""
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(records)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


def seed_state(job_seed: int, batch: BatchId, generator: int) -> npt.NDArray[np.uint32]:
    """Returns ``[2] uint32``, the state of the model's ``generator``-th seed generator (in model
    order) for ``batch``, so that every worker draws the same masks for it.

    Both words fit the int64 in which Keras keeps the state on TensorFlow.
    """
    text = f"{job_seed} {batch.epoch} {batch.first} {batch.count} {generator}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], "<u4").astype(np.uint32)


class RecordOrder:
    """The permutation of all records of each epoch; caches the last epochs used. Thread-safe."""

    def __init__(self, records: int) -> None:
        self._records = records
        self._lock = Lock()
        self._epochs: OrderedDict[tuple[int, int], npt.NDArray[np.int64]] = OrderedDict()

    def records_at(self, seed: int, epoch: int, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Returns ``[stop - first]``, the records at positions ``[first, stop)`` of ``epoch``; a
        view."""
        key = (seed, epoch)
        with self._lock:
            if key not in self._epochs:
                self._epochs[key] = self._permuted(*key)
                while len(self._epochs) > KEPT_EPOCHS:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(key)
            return self._epochs[key][first:stop]

    def _permuted(self, *key: int) -> npt.NDArray[np.int64]:
        return permutation(self._records, *key)


class GroupOrder(RecordOrder):
    """An order for files that are read by groups of records: permutes the groups, takes ``mix`` of
    them at a time, and permutes the records of these."""

    def __init__(self, sizes: Sequence[int], mix: int) -> None:
        super().__init__(sum(sizes))
        self._ends = np.cumsum([0, *sizes])
        self._mix = mix

    def _permuted(self, *key: int) -> npt.NDArray[np.int64]:
        groups = permutation(len(self._ends) - 1, *key)
        found = [np.empty(0, np.int64)]
        for at in range(0, len(groups), self._mix):
            some = groups[at : at + self._mix]
            records = np.concatenate([np.arange(*self._ends[each : each + 2]) for each in some])
            found.append(records[permutation(len(records), *key, at)])
        return np.concatenate(found)


class BlockOrder:
    """An order for sources that read front to back: permutes the blocks of ``block_records``
    records, and the records within each block. Thread-safe."""

    def __init__(self, records: int, block_records: int) -> None:
        self._records = records
        self._block_records = block_records
        self._count = -(-records // block_records)
        self._blocks = RecordOrder(self._count)

    def range_of(self, block: int) -> tuple[int, int]:
        """Returns the records ``[start, stop)`` of a block; the last block may be short."""
        start = block * self._block_records
        return start, min(start + self._block_records, self._records)

    def pieces(self, seed: int, epoch: int, first: int, stop: int) -> list[tuple[int, int, int]]:
        """Splits positions ``[first, stop)`` of an epoch into ``(block, low, high)``: places
        ``[low, high)`` of the shuffled block, in ascending order of position."""
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
        """Returns the order of the records within a block, as places counted from its start."""
        start, stop = self.range_of(block)
        return permutation(stop - start, seed, epoch, block)
