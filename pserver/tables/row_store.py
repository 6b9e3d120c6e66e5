"""The rows of a table, column by column, and its evicted rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.tables.hash_index import Slots
from pserver.tables.id_store import MAX_VOCABULARY, DirectIndex, IdStore
from pserver.tables.memory import Column, scatter
from pserver.tables.part import TablePart

MAX_NBYTES = 32 << 20
"""The most bytes of evicted rows that a shard keeps of one table."""

_PIECES = 8
"""A full store of evicted rows has at least this many pieces; it drops whole pieces."""


class RowStore(IdStore):
    """An :class:`IdStore` whose ids have rows.

    Attributes:
        values: float32 ``[capacity, width]``.
        slots: optimizer slot -> float32 ``[capacity, width or 1]``.
    """

    def __init__(
        self, width: int, slot_widths: Mapping[str, int], vocabulary: int | None = None
    ) -> None:
        """``vocabulary``: upper bound of ids, exclusive, or None."""
        super().__init__()
        if vocabulary is not None and vocabulary <= MAX_VOCABULARY:
            self.index = DirectIndex(vocabulary)
        self.values = Column(np.float32, width)
        self.slots = {name: Column(np.float32, wide) for name, wide in slot_widths.items()}
        self.columns = (*self.columns, self.values, *self.slots.values())

    def copy(self, at: Slots, into: RowStore) -> Slots:
        """Appends the rows ``at`` to ``into``, which has room and never lost a row; returns their
        slots there. Does not change the index."""
        to = into.take(len(at))
        if len(at):
            run = slice(int(to[0]), int(to[-1]) + 1)
            for ours, theirs in zip(self.columns, into.columns, strict=True):
                np.take(ours.rows(), at, axis=0, out=theirs.rows()[run], mode="clip")
        return to

    def column(self, name: str, at: Slots) -> npt.NDArray[Any]:
        """Copies one column of :meth:`part`: ``ids``, ``values``, ``counts``, ``touched``, or
        ``slot/SLOT``."""
        if name == "touched":
            return self.touched.rows().take(at) - np.uint32(1)
        columns = {"ids": self.ids, "values": self.values, "counts": self.counts}
        column = columns[name] if name in columns else self.slots[name.removeprefix("slot/")]
        return column.rows().take(at, axis=0)

    def part(self, at: Slots) -> TablePart:
        """Copies the rows in the slots ``at``."""
        return TablePart(
            ids=self.ids.rows().take(at),
            values=self.values.rows().take(at, axis=0),
            slots={name: column.rows().take(at, axis=0) for name, column in self.slots.items()},
            counts=self.counts.rows().take(at),
            touched=self.touched.rows().take(at) - np.uint32(1),
        )

    def put(self, at: Slots, part: TablePart) -> None:
        """Writes ``part`` to the slots ``at``, distinct. Does not change the index."""
        self.ids.rows()[at] = part.ids
        self.put_marks(at, part.counts, part.touched)
        scatter(self.values.rows(), at, part.values)
        for name, column in self.slots.items():
            scatter(column.rows(), at, part.slots[name])


class Evicted:
    """The latest evicted rows, up to :data:`MAX_NBYTES`, by the version that evicted them.

    Attributes:
        dropped: rows dropped before a checkpoint had them.
        nbytes: of the kept rows.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.nbytes = 0
        self._parts: deque[tuple[int, int, TablePart]] = deque()  # version, bytes, rows

    def add(self, version: int, store: RowStore, at: Slots) -> None:
        """Copies the rows of ``store`` in the slots ``at``, before ``version`` evicts them, and
        drops the oldest rows beyond :data:`MAX_NBYTES`."""
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
        """Returns the kept rows with their versions, oldest first; the parts never change."""
        return tuple((version, part) for version, _, part in self._parts)

    def let_go(self, version: int) -> None:
        """Drops the rows that ``version`` or an earlier one evicted."""
        while self._parts and self._parts[0][0] <= version:
            self._pop()

    def clear(self) -> None:
        """Drops all rows."""
        self._parts.clear()
        self.nbytes = 0

    def _pop(self) -> TablePart:
        _, nbytes, part = self._parts.popleft()
        self.nbytes -= nbytes
        return part


def newest(parts: Iterable[TablePart], empty: TablePart) -> TablePart:
    """Merges ``parts``, given oldest first, by ascending id; the last row of an id wins. ``empty``
    has no rows and defines the columns."""
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
