"""Which slot each id has, how often it was named and when last."""

from __future__ import annotations

import numpy as np

from pserver.tables.hash_index import HashIndex, Slots
from pserver.tables.memory import Column
from pserver.tables.part import Counts
from psrpc.core.tables import Ids

MAX_VOCABULARY = 1 << 24
"""Larger vocabularies are hashed: this takes 4 bytes for each id of the vocabulary, 64 MiB at most,
whether it has a row or not."""


NEWEST = 2**32 - 2
"""The highest version and count that are remembered; what is above is taken for it."""


class IdStore:
    """Ids by slot number, and the slot of each id. Not thread-safe.

    Attributes:
        ids: int64.
        counts: uint32, applied pushes that named the id.
        touched: uint32, the version that named it last plus one; 0 in a slot that has no id.
        used: slots that were ever given out. Those from here on have no id.
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
        """Bytes of the slots that were given out and of the index."""
        return self.used * self.row_nbytes + self.index.nbytes + self._free.nbytes

    def find(self, ids: Ids) -> Slots:
        """The slot of each id, −1 where it has none."""
        return self.index.find(ids, self.ids.rows())

    def reserve(self, ids: Ids) -> None:
        """Makes room for ``ids``, distinct and not there yet, so that adding them needs no more
        address space.

        Raises:
            OSError: the kernel grants none. Nothing was changed.
        """
        for column in self.columns:
            column.reserve(self.used + len(ids))
        self.index.reserve(ids, self.ids.rows())

    def take(self, rows: int) -> Slots:
        """Gives out ``rows`` slots, for which there is room; those of removed ids first."""
        old = self._free[:0]
        if len(self._free):
            old, self._free = np.split(self._free, [min(rows, len(self._free))])
        fresh = rows - len(old)
        self.used += fresh
        new = np.arange(self.used - fresh, self.used)
        return np.concatenate([old, new]) if len(old) else new

    def add(self, ids: Ids, counts: Counts, version: int, at: Slots | None = None) -> Slots:
        """Adds ``ids``, which are distinct and not there yet, in the slots ``at`` that :meth:`take`
        gave, or in others; returns their slots."""
        if at is None:
            at = self.take(len(ids))
        self.ids.rows()[at] = ids
        self.counts.rows()[at] = counts
        self.touched.rows()[at] = stored(version)
        self.index.insert(ids, at, self.ids.rows())
        return at

    def put_marks(self, at: Slots, counts: Counts, touched: Counts) -> None:
        """Sets how often the ids in the slots ``at``, distinct, were named, and by which version
        last."""
        self.counts.rows()[at] = counts
        self.touched.rows()[at] = np.minimum(touched, np.uint32(NEWEST)) + np.uint32(1)

    def remove(self, at: Slots) -> None:
        """Takes out the ids that have these slots, which others may have then."""
        self.index.remove(self.ids.rows()[at], at)
        self.touched.rows()[at] = 0
        self._free = np.concatenate([self._free, at])

    def touch(self, at: Slots, version: int) -> None:
        """Counts one more push that named what is in the slots ``at``, at ``version``."""
        counts = self.counts.rows()
        named: Counts = counts.take(at)
        named += named < NEWEST
        counts[at] = named
        self.touched.rows()[at] = stored(version)


def stored(version: int) -> np.uint32:
    """``version`` as the column ``touched`` has it."""
    return np.uint32(min(version, NEWEST) + 1)


class DirectIndex:
    """As :class:`pserver.tables.hash_index.HashIndex`, of ids from 0 to ``vocabulary - 1``: many
    times as fast, since ids that ascend are looked up in the order of memory.

    Not thread-safe.
    """

    def __init__(self, vocabulary: int) -> None:
        self._rows = 0
        # Of each id, the slot plus one.
        self._places = Column(np.int32)
        self._places.reserve(vocabulary)
        self._page_ids = self._places.page_rows
        self._touched = np.zeros(-(-self._places.capacity // self._page_ids), np.bool_)
        """Of each page, whether it was ever written."""

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the pages of places that an id has come to, which is what they take at most.
        They stay when their ids go."""
        pages = int(np.count_nonzero(self._touched))
        return pages * self._page_ids * self._places.row_nbytes

    def find(self, ids: Ids, _keys: Ids) -> Slots:
        """The slot of each id, ``[n]``, −1 where there is none."""
        slots = self._places.rows().take(ids).astype(np.int64)
        slots -= 1
        return slots

    def reserve(self, ids: Ids, keys: Ids) -> None:
        """There is always room."""

    def reserve_space(self, rows: int) -> None:
        """There is always space."""

    def insert(self, ids: Ids, slots: Slots, _keys: Ids) -> None:
        """Adds ``ids``, distinct and not in the index yet."""
        self._places.rows()[ids] = slots + 1
        self._touched[ids // self._page_ids] = True
        self._rows += len(ids)

    def remove(self, ids: Ids, _slots: Slots) -> None:
        """Takes out ``ids``."""
        self._places.rows()[ids] = 0
        self._rows -= len(ids)
