"""Which slot a row has: an open-addressing hash table that works on whole arrays of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.tables.memory import Column
from psrpc.tables import Ids, mix

Slots = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]

_SMALLEST = 1 << 10
_BLOCK = 1 << 13
"""Ids looked up at a time: what is computed of them stays in the second-level cache."""

_EMPTY = 0
_REMOVED = -1


class HashIndex:
    """id -> slot. The ids are not kept here but in the table's own column of one id per slot,
    ``keys``, which methods take where they need it: a bucket is the slot plus one in 4 bytes.

    Buckets are probed at triangular distances (Knuth, TAOCP volume 3, section 6.4: with a power of
    two as their number each is met once). At most half of them hold slots, so that most ids are
    found at the first or second. The first bucket is the lower bits of :func:`psrpc.tables.mix`,
    of which the shard is the upper half. A removed slot leaves a mark, which the next id that comes
    by takes.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._used = 0
        self._clear(_SMALLEST)

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets."""
        return 4 * self._size

    def find(self, ids: Ids, keys: Ids) -> Slots:
        """The slot of each id, ``[n]``, −1 where there is none."""
        slots = np.empty(len(ids), np.int64)
        buckets = self._buckets.rows()
        for start in range(0, len(ids), _BLOCK):
            self._find(ids[start : start + _BLOCK], keys, buckets, slots[start : start + _BLOCK])
        return slots

    def _find(self, ids: Ids, keys: Ids, buckets: npt.NDArray[Any], slots: Slots) -> None:
        places = self._first(ids)
        found = buckets.take(places)
        # Without a slot a bucket points at a row before the first: clipped, and not looked at.
        np.subtract(found, 1, out=slots)
        same = keys.take(slots, mode="clip") == ids
        same &= found > _EMPTY
        other = np.flatnonzero(~same)
        slots[other] = -1
        other = other[found[other] != _EMPTY]
        places, step = places[other], 0
        while len(other):
            step += 1
            places += step
            places &= self._size - 1
            found = buckets.take(places)
            same = keys.take(found - 1, mode="clip") == ids[other]
            same &= found > _EMPTY
            slots[other[same]] = found[same] - 1
            on = np.flatnonzero(~same & (found != _EMPTY))
            other, places = other[on], places[on]

    def reserve(self, rows: int, keys: Ids) -> None:
        """Makes room for ``rows`` more, so that :meth:`insert` of them needs no more memory.

        Raises:
            OSError: the kernel grants no more address space. Nothing was changed.
        """
        size = self._size
        while 2 * (self._rows + rows) > size:
            size *= 2
        # Marks of removed slots lengthen every search: with too many of them all is laid out anew.
        if size == self._size and 8 * (self._used + rows) <= 5 * size:
            return
        buckets = self._buckets.rows()
        # 4 bytes each: for a moment they are there beside both generations of buckets.
        slots = buckets[buckets > _EMPTY]
        slots -= 1
        del buckets
        self._clear(size)
        for start in range(0, len(slots), _BLOCK):
            block = slots[start : start + _BLOCK].astype(np.int64)
            self._insert(keys.take(block), block)

    def insert(self, ids: Ids, slots: Slots, keys: Ids) -> None:
        """Adds ``ids``, distinct and not in the index yet. ``keys`` may hold them already."""
        self.reserve(len(ids), keys)
        for start in range(0, len(ids), _BLOCK):
            self._insert(ids[start : start + _BLOCK], slots[start : start + _BLOCK])

    def _insert(self, ids: Ids, slots: Slots) -> None:
        buckets = self._buckets.rows()
        places, marks = self._first(ids), (slots + 1).astype(np.int32)
        self._rows += len(ids)
        step = 0
        while len(marks):
            found = buckets.take(places)
            free = np.flatnonzero(found <= _EMPTY)
            # Several ids may want one bucket: each writes, and who reads itself back has got it.
            wanted, own = places[free], marks[free]
            buckets[wanted] = own
            won = buckets.take(wanted) == own
            self._used += int(np.count_nonzero(found[free[won]] == _EMPTY))
            on = np.ones(len(marks), np.bool_)
            on[free[won]] = False
            step += 1
            places, marks = places[on], marks[on]
            places += step
            places &= self._size - 1

    def remove(self, ids: Ids, slots: Slots) -> None:
        """Takes out ``ids``, which have these slots."""
        buckets = self._buckets.rows()
        places, marks = self._first(ids), (slots + 1).astype(np.int32)
        self._rows -= len(ids)
        step = 0
        while len(marks):
            same = buckets.take(places) == marks
            buckets[places[same]] = _REMOVED
            step += 1
            places, marks = places[~same], marks[~same]
            places += step
            places &= self._size - 1

    def _first(self, ids: Ids) -> Places:
        hashes = mix(ids)
        hashes &= np.uint64(self._size - 1)
        return hashes.view(np.int64)

    def _clear(self, size: int) -> None:
        buckets = Column(np.int32)
        buckets.reserve(size)
        self._buckets, self._size = buckets, size
        self._rows = self._used = 0
