"""An index from id to slot: an open-addressing hash table that works on whole arrays of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.tables.memory import Column
from psrpc.core.tables import Ids, mix

Slots = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]

_SMALLEST = 1 << 10
_SEGMENT = 1 << 15
"""Number of buckets rehashed at once: 128 KiB, about a millisecond."""

_BLOCK = 1 << 13
"""Number of ids looked up at a time, so that intermediate arrays stay in the second-level cache."""

_EMPTY = 0
_REMOVED = -1


class HashIndex:
    """Maps ids to slots. Not thread-safe.

    A bucket stores the slot plus one, in 4 bytes. The ids themselves are in a column of the table
    that has one id per slot; methods take it as ``keys``.

    Collisions are resolved by probing at triangular distances within a segment of buckets, which
    reaches each bucket of the segment once, since their number is a power of two (Knuth, TAOCP
    volume 3, section 6.4). The lower bits of :func:`psrpc.core.tables.mix` select the first bucket;
    the upper half, which selects the shard, is not used. Removing a slot leaves a mark in its
    bucket; an id that is inserted later may overwrite the mark.

    The index grows by one segment at a time, so that no insert waits for a full rehash (Litwin
    1980, "Linear hashing"): it splits the next segment, by one more bit of the ids' hashes, into
    itself and a new segment at the end. While the load rises from 3/8 to 1/2 of the buckets, each
    segment is split once. So little more than half of a segment is ever used, and most ids are in
    their first or second bucket.
    """

    def __init__(self) -> None:
        self._rows = self._size = 0
        self._buckets = Column(np.int32)
        # Number of buckets in one segment, and in all segments before the splits of this level.
        self._segment: int
        self._level: int
        # For each segment: the number of slots inserted since its last rehash, and the limit of
        # that. The limits differ, between 5/8 and 3/4 of the buckets, so that the segments do not
        # reach them at the same time.
        self._taken: npt.NDArray[np.int64]
        self._limits: npt.NDArray[np.int64]
        self._clear(_SMALLEST, _SMALLEST)

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets."""
        return 4 * self._size

    def find(self, ids: Ids, keys: Ids) -> Slots:
        """Returns the slot of each id, ``[n]``, −1 for absent ids."""
        slots = np.empty(len(ids), np.int64)
        buckets = self._buckets.rows()
        others, moved = [], []
        for start in range(0, len(ids), _BLOCK):
            block = slice(start, start + _BLOCK)
            other, places = self._find_at_first(ids[block], keys, buckets, slots[block])
            others.append(other + start)
            moved.append(places)
        if others:
            # The rest of all blocks at once: these ids are few, so a step costs mostly the NumPy
            # calls.
            self._find_further(ids, keys, slots, np.concatenate(others), np.concatenate(moved))
        return slots

    def _find_at_first(
        self, ids: Ids, keys: Ids, buckets: npt.NDArray[Any], slots: Slots
    ) -> tuple[npt.NDArray[np.intp], Places]:
        """Probes the first bucket of each id. Returns the indices of the ids to probe further, and
        the buckets that were probed for them."""
        places = self._first(ids)
        marks = buckets.take(places)
        # A bucket without a slot yields a negative slot, which `take` clips; its result is then
        # ignored.
        np.subtract(marks, 1, out=slots)
        same = keys.take(slots, mode="clip") == ids
        same &= marks > _EMPTY
        other = np.flatnonzero(~same)
        slots[other] = -1
        other = other[marks[other] != _EMPTY]
        return other, places[other]

    def _find_further(
        self, ids: Ids, keys: Ids, slots: Slots, other: npt.NDArray[np.intp], places: Places
    ) -> None:
        """Looks up ``ids[other]``, beginning with the buckets after ``places``; writes to
        ``slots``."""
        buckets, step = self._buckets.rows(), 0
        while len(other):
            step += 1
            self._probe(places, step)
            marks = buckets.take(places)
            same = keys.take(marks - 1, mode="clip") == ids[other]
            same &= marks > _EMPTY
            slots[other[same]] = marks[same] - 1
            on = np.flatnonzero(~same & (marks != _EMPTY))
            other, places = other[on], places[on]

    def reserve(self, ids: Ids, keys: Ids) -> None:
        """Makes room for ``ids``, distinct and not in the index, so that :meth:`insert` of them
        needs no more memory.

        Raises:
            OSError: the kernel grants no more address space; the index is unchanged.
        """
        rows = self._rows + len(ids)
        size = self._size
        while size < _SEGMENT and 2 * rows > size:
            size *= 2
        if size > self._size:
            self._lay_out(size, size, keys)
        while (size := self._size_for(rows)) > self._size:
            self._split(size, keys)
        while not self._tidied(ids, keys):
            # Practically never happens: a segment has no room for its ids. Doubles the size of
            # segments until each has room; a single segment for all ids always has.
            segment = 2 * self._segment
            self._lay_out(max(segment, 1 << (self._size - 1).bit_length()), segment, keys)

    def reserve_space(self, rows: int) -> None:
        """Reserves address space for ``rows`` ids in total, so that no insert can fail until there
        are more.

        Raises:
            OSError: the kernel grants no more.
        """
        self._buckets.reserve(4 * rows + _SEGMENT)

    def insert(self, ids: Ids, slots: Slots, keys: Ids) -> None:
        """Adds ``ids``, which are distinct and not in the index. ``keys`` may contain them
        already."""
        self.reserve(ids, keys)
        self._rows += len(ids)
        self._taken += self._per_segment(ids)
        self._insert(ids, slots)

    def remove(self, ids: Ids, slots: Slots) -> None:
        """Removes ``ids``, whose slots are ``slots``."""
        buckets = self._buckets.rows()
        places, marks = self._first(ids), (slots + 1).astype(np.int32)
        self._rows -= len(ids)
        step = 0
        while len(marks):
            same = buckets.take(places) == marks
            buckets[places[same]] = _REMOVED
            step += 1
            places, marks = places[~same], marks[~same]
            self._probe(places, step)

    def _insert(self, ids: Ids, slots: Slots) -> None:
        """Writes the slots to the buckets, without counting them."""
        for start in range(0, len(ids), _BLOCK):
            block = slice(start, start + _BLOCK)
            self._insert_block(self._first(ids[block]), (slots[block] + 1).astype(np.int32))

    def _insert_block(self, places: Places, marks: npt.NDArray[np.int32]) -> None:
        buckets = self._buckets.rows()
        step = 0
        while len(marks):
            free = np.flatnonzero(buckets.take(places) <= _EMPTY)
            # Several ids may want the same bucket. Each writes its mark; the one whose mark is then
            # there has won the bucket.
            wanted, own = places[free], marks[free]
            buckets[wanted] = own
            won = buckets.take(wanted) == own
            on = np.ones(len(marks), np.bool_)
            on[free[won]] = False
            step += 1
            places, marks = places[on], marks[on]
            self._probe(places, step)

    def _first(self, ids: Ids) -> Places:
        hashes = mix(ids)
        if self._size == self._level:
            hashes &= np.uint64(self._level - 1)
            return hashes.view(np.int64)
        hashes &= np.uint64(2 * self._level - 1)
        places = hashes.view(np.int64)
        # Segments that are not split yet use one bit less.
        places -= (places >= self._size) * self._level
        return places

    def _probe(self, places: Places, step: int) -> None:
        """Moves each of ``places`` to its next bucket, within its segment."""
        moved = places + step
        moved ^= places
        moved &= self._segment - 1
        places ^= moved

    def _per_segment(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Counts the ``ids`` of each segment."""
        if len(self._taken) == 1:
            return np.array([len(ids)])
        return np.bincount(self._first(ids) // self._segment, minlength=len(self._taken))

    def _size_for(self, rows: int) -> int:
        """Returns the number of buckets that ``rows`` need, at most as many as this level can
        have."""
        if self._segment < _SEGMENT:
            return self._size
        want = -(-(8 * rows - 2 * self._level) // self._segment) * self._segment
        return max(self._size, min(want, 2 * self._level))

    def _split(self, size: int, keys: Ids) -> None:
        """Splits the next segments, each into itself and a new one, until there are ``size``
        buckets."""
        self._buckets.reserve(size)
        start, stop = self._size - self._level, size - self._level
        first, new = start // self._segment, (size - self._size) // self._segment
        slots = self._emptied(start, stop)
        self._size = size
        if size == 2 * self._level:
            self._level = size
        self._taken[first : first + new] = 0
        self._taken = np.concatenate([self._taken, np.zeros(new, np.int64)])
        self._limits = self._limits_of(len(self._taken))
        self._put_back(slots, keys)

    def _tidied(self, ids: Ids, keys: Ids) -> bool:
        """Rehashes segments with too many marks of removed slots, since these make searches longer.
        Returns whether each segment then has room for its part of ``ids``."""
        new = self._per_segment(ids)
        for segment in np.flatnonzero(self._taken + new > self._limits).tolist():
            start = segment * self._segment
            slots = self._emptied(start, start + self._segment)
            self._taken[segment] = 0
            self._put_back(slots, keys)
        return bool((self._taken + new <= self._limits).all())

    def _lay_out(self, size: int, segment: int, keys: Ids) -> None:
        """Rehashes all ids into ``size`` buckets, a power of two."""
        self._buckets.reserve(size)
        slots = self._emptied(0, self._size)
        self._clear(size, segment)
        self._put_back(slots, keys)

    def _emptied(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Empties the buckets from ``start`` to ``stop`` and returns their slots."""
        buckets = self._buckets.rows()[start:stop]
        slots: npt.NDArray[np.int32] = buckets[buckets > _EMPTY]
        slots -= 1
        buckets[:] = _EMPTY
        return slots

    def _put_back(self, slots: npt.NDArray[np.int32], keys: Ids) -> None:
        for start in range(0, len(slots), _BLOCK):
            block = slots[start : start + _BLOCK].astype(np.int64)
            ids = keys.take(block)
            self._taken += self._per_segment(ids)
            self._insert(ids, block)

    def _clear(self, size: int, segment: int) -> None:
        self._buckets.reserve(size)
        self._buckets.rows()[: self._size] = _EMPTY
        self._size = self._level = size
        self._segment = segment
        self._taken = np.zeros(size // segment, np.int64)
        self._limits = self._limits_of(len(self._taken))

    def _limits_of(self, segments: int) -> npt.NDArray[np.int64]:
        eighth = self._segment // 8
        spread = mix(np.arange(segments)) % np.uint64(eighth)
        return 5 * eighth + spread.astype(np.int64)
