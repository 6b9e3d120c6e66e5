"""The slot of each id, how many pushes named it, and the last version that did."""

from __future__ import annotations

import numpy as np

from pserver.tables.hash_index import HashIndex, Slots
from pserver.tables.memory import Column
from pserver.tables.part import Counts
from psrpc.core.tables import Ids

MAX_VOCABULARY = 1 << 24
"""Larger vocabularies use the hash index: a direct one takes 4 bytes for each id of the vocabulary,
with or without a row, 64 MiB at most."""

NEWEST = 2**32 - 2
"""The highest version and count stored; higher ones are clamped to it."""


class IdStore:
    """Ids by slot number, and the slot of each id. Not thread-safe.

    Attributes:
        ids: int64.
        counts: uint32, applied pushes that named the id.
        touched: uint32, the version that named it last plus one; 0 in a slot without an id.
        used: slots ever given out; those from here on have no id.
        index: id -> slot.
    """

    def __init__(self) -> None:
        self.ids = Column(np.int64)
        self.counts = Column(np.uint32)
        self.touched = Column(np.uint32)
        self.used = 0
        self.index: HashIndex | DirectIndex = HashIndex()
        self.columns: tuple[Column, ...] = (self.ids, self.counts, self.touched)
        self._free: Slots = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one slot, over all columns."""
        return sum(column.row_nbytes for column in self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of the given-out slots and of the index."""
        return self.used * self.row_nbytes + self.index.nbytes + self._free.nbytes

    def find(self, ids: Ids) -> Slots:
        """Returns the slot of each id, −1 for absent ids."""
        return self.index.find(ids, self.ids.rows())

    def reserve(self, ids: Ids) -> None:
        """Makes room for ``ids``, distinct and absent, so that adding them needs no more address
        space.

        Raises:
            OSError: the kernel grants none; the store is unchanged.
        """
        for column in self.columns:
            column.reserve(self.used + len(ids))
        self.index.reserve(ids, self.ids.rows())

    def take(self, rows: int) -> Slots:
        """Gives out ``rows`` slots, which :meth:`reserve` made; slots of removed ids first."""
        old = self._free[:0]
        if len(self._free):
            old, self._free = np.split(self._free, [min(rows, len(self._free))])
        fresh = rows - len(old)
        self.used += fresh
        new = np.arange(self.used - fresh, self.used)
        return np.concatenate([old, new]) if len(old) else new

    def add(self, ids: Ids, counts: Counts, version: int, at: Slots | None = None) -> Slots:
        """Adds ``ids``, distinct and absent, to the slots ``at`` from :meth:`take`, or to new ones;
        returns their slots."""
        if at is None:
            at = self.take(len(ids))
        self.ids.rows()[at] = ids
        self.counts.rows()[at] = counts
        self.touched.rows()[at] = stored(version)
        self.index.insert(ids, at, self.ids.rows())
        return at

    def put_marks(self, at: Slots, counts: Counts, touched: Counts) -> None:
        """Sets the counts and last versions of the ids in the slots ``at``, distinct."""
        self.counts.rows()[at] = counts
        self.touched.rows()[at] = np.minimum(touched, np.uint32(NEWEST)) + np.uint32(1)

    def remove(self, at: Slots) -> None:
        """Removes the ids in the slots ``at``, and frees the slots."""
        self.index.remove(self.ids.rows()[at], at)
        self.touched.rows()[at] = 0
        self._free = np.concatenate([self._free, at])

    def touch(self, at: Slots, version: int) -> None:
        """Counts one more push, of ``version``, that names the ids in the slots ``at``."""
        counts = self.counts.rows()
        named: Counts = counts.take(at)
        named += named < NEWEST
        counts[at] = named
        self.touched.rows()[at] = stored(version)


def stored(version: int) -> np.uint32:
    """Converts ``version`` to its form in the column ``touched``."""
    return np.uint32(min(version, NEWEST) + 1)


class DirectIndex:
    """A :class:`pserver.tables.hash_index.HashIndex` for ids from 0 to ``vocabulary - 1``; many
    times as fast, since it looks up ascending ids in memory order. Not thread-safe."""

    def __init__(self, vocabulary: int) -> None:
        self._rows = 0
        # id -> slot plus one.
        self._places = Column(np.int32)
        self._places.reserve(vocabulary)
        self._page_ids = self._places.page_rows
        self._touched = np.zeros(-(-self._places.capacity // self._page_ids), np.bool_)
        """Whether each page was ever written."""

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the pages ever written, the most that the index occupies. Pages stay when their
        ids are removed."""
        pages = int(np.count_nonzero(self._touched))
        return pages * self._page_ids * self._places.row_nbytes

    def find(self, ids: Ids, _keys: Ids) -> Slots:
        """Returns the slot of each id, ``[n]``, −1 for absent ids."""
        slots = self._places.rows().take(ids).astype(np.int64)
        slots -= 1
        return slots

    def reserve(self, ids: Ids, keys: Ids) -> None:
        """Does nothing: the index has room for the whole vocabulary."""

    def reserve_space(self, rows: int) -> None:
        """Does nothing: the index has room for the whole vocabulary."""

    def insert(self, ids: Ids, slots: Slots, _keys: Ids) -> None:
        """Adds ``ids``, distinct and not in the index."""
        self._places.rows()[ids] = slots + 1
        self._touched[ids // self._page_ids] = True
        self._rows += len(ids)

    def remove(self, ids: Ids, _slots: Slots) -> None:
        """Removes ``ids``."""
        self._places.rows()[ids] = 0
        self._rows -= len(ids)
