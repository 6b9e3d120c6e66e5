"""Evicted rows, kept until a checkpoint has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from pserver.tables.hash_index import Slots
from pserver.tables.part import TablePart
from pserver.tables.row_store import RowStore

MAX_NBYTES = 32 << 20
"""Bytes of evicted rows that a shard keeps of one table."""

_PIECES = 8
"""Pieces that all that may be kept comes in at least: the oldest is dropped as a whole."""


class Evicted:
    """The latest evicted rows, at most :data:`MAX_NBYTES` of them, by the version that evicted
    them.

    Attributes:
        dropped: rows that had to go before a checkpoint had them.
        nbytes: of what is kept.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.nbytes = 0
        self._parts: deque[tuple[int, int, TablePart]] = deque()  # version, bytes, rows

    def add(self, version: int, store: RowStore, at: Slots) -> None:
        """Keeps copies of the rows that ``store`` has in the slots ``at``, which ``version`` evicts
        now. Where there is no room for all, the oldest are dropped."""
        most = MAX_NBYTES // store.row_nbytes
        surplus = max(0, len(at) - most)
        self.dropped += surplus
        piece = max(1, most // _PIECES)
        for start in range(surplus, len(at), piece):
            part = store.part(at[start : start + piece])
            nbytes = len(part) * store.row_nbytes
            self._parts.append((version, nbytes, part))
            self.nbytes += nbytes
        while self.nbytes > MAX_NBYTES:
            self.dropped += len(self._pop())

    def parts(self) -> tuple[tuple[int, TablePart], ...]:
        """All that is kept, oldest first, with the versions; nothing of it is changed later."""
        return tuple((version, part) for version, _, part in self._parts)

    def let_go(self, version: int) -> None:
        """Keeps those no longer that ``version`` or an earlier one evicted."""
        while self._parts and self._parts[0][0] <= version:
            self._pop()

    def clear(self) -> None:
        """Keeps nothing of what there is."""
        self._parts.clear()
        self.nbytes = 0

    def _pop(self) -> TablePart:
        _, nbytes, part = self._parts.popleft()
        self.nbytes -= nbytes
        return part


def newest(parts: Iterable[TablePart], empty: TablePart) -> TablePart:
    """The rows of all ``parts``, oldest first, ids ascending; of an id that occurs several times
    the last row. ``empty`` has no rows and says what columns there are."""
    parts = [empty, *parts]
    ids = np.concatenate([part.ids for part in parts])
    ids, last = np.unique(ids[::-1], return_index=True)
    last = np.sum([len(part) for part in parts]) - 1 - last
    return TablePart(
        ids=ids,
        values=np.concatenate([part.values for part in parts])[last],
        slots={n: np.concatenate([part.slots[n] for part in parts])[last] for n in empty.slots},
        counts=np.concatenate([part.counts for part in parts])[last],
        touched=np.concatenate([part.touched for part in parts])[last],
    )
