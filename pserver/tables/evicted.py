"""Evicted rows, kept until somebody asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from pserver.tables.part import TablePart

MAX_NBYTES = 32 << 20
"""Bytes of evicted rows that a shard keeps of one table."""


class Evicted:
    """The latest evicted rows, at most :data:`MAX_NBYTES` of them.

    Attributes:
        dropped: rows that were let go of before anybody asked.
    """

    def __init__(self, width: int, slot_widths: Mapping[str, int]) -> None:
        self.dropped = 0
        self._widths = {"": width, **slot_widths}
        self._row_nbytes = 16 + 4 * sum(self._widths.values())
        self._parts: deque[TablePart] = deque()
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return self._rows * self._row_nbytes

    def add(self, part: TablePart) -> None:
        """Keeps ``part``, and lets go of the oldest parts where there is no room for all."""
        self._parts.append(part)
        self._rows += len(part)
        while self.nbytes > MAX_NBYTES:
            gone = len(self._parts.popleft())
            self._rows -= gone
            self.dropped += gone

    def take(self) -> TablePart:
        """All that is kept, oldest first; it is kept no longer. An id may occur several times."""
        parts = list(self._parts)
        self._parts.clear()
        self._rows = 0
        empty = {name: np.empty((0, wide), np.float32) for name, wide in self._widths.items()}
        values = empty.pop("")
        return TablePart(
            ids=np.concatenate([np.empty(0, np.int64), *(p.ids for p in parts)]),
            values=np.concatenate([values, *(p.values for p in parts)]),
            slots={
                n: np.concatenate([none, *(p.slots[n] for p in parts)]) for n, none in empty.items()
            },
            counts=np.concatenate([np.empty(0, np.uint32), *(p.counts for p in parts)]),
            touched=np.concatenate([np.empty(0, np.uint32), *(p.touched for p in parts)]),
        )
