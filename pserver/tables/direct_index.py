"""Which slot a row has, where ids are few and small: one place for each id."""

from __future__ import annotations

import numpy as np

from pserver.tables.hash_index import Slots
from pserver.tables.memory import Column
from psrpc.core.tables import Ids

MAX_VOCABULARY = 1 << 24
"""Larger vocabularies are hashed: this takes 4 bytes for each id of the vocabulary, 64 MiB at most,
whether it has a row or not."""


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
