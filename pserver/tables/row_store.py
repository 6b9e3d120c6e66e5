"""What a table keeps of each row, column by column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.tables.direct_index import MAX_VOCABULARY, DirectIndex
from pserver.tables.hash_index import Slots
from pserver.tables.id_store import IdStore
from pserver.tables.memory import Column, scatter
from pserver.tables.part import TablePart


class RowStore(IdStore):
    """An :class:`IdStore` whose ids have rows.

    Attributes:
        values: float32 ``[capacity, width]``.
        slots: optimizer slot -> float32 ``[capacity, width or 1]``.
    """

    def __init__(
        self, width: int, slot_widths: Mapping[str, int], vocabulary: int | None = None
    ) -> None:
        """``vocabulary``: ids are below it, if it is not None."""
        super().__init__()
        if vocabulary is not None and vocabulary <= MAX_VOCABULARY:
            self.index = DirectIndex(vocabulary)
        self.values = Column(np.float32, width)
        self.slots = {name: Column(np.float32, wide) for name, wide in slot_widths.items()}
        self.columns = (*self.columns, self.values, *self.slots.values())

    def copy(self, at: Slots, into: RowStore) -> Slots:
        """Appends the rows ``at`` to ``into``, which has room and from which none was removed;
        returns their slots there. The index is left as it is."""
        to = into.take(len(at))
        if len(at):
            run = slice(int(to[0]), int(to[-1]) + 1)
            for ours, theirs in zip(self.columns, into.columns, strict=True):
                np.take(ours.rows(), at, axis=0, out=theirs.rows()[run], mode="clip")
        return to

    def column(self, name: str, at: Slots) -> npt.NDArray[Any]:
        """A copy of one column of :meth:`part`: ``ids``, ``values``, ``counts``, ``touched``, or
        ``slot/SLOT``."""
        if name == "touched":
            return self.touched.rows().take(at) - np.uint32(1)
        columns = {"ids": self.ids, "values": self.values, "counts": self.counts}
        column = columns[name] if name in columns else self.slots[name.removeprefix("slot/")]
        return column.rows().take(at, axis=0)

    def part(self, at: Slots) -> TablePart:
        """A copy of the rows in the slots ``at``."""
        return TablePart(
            ids=self.ids.rows().take(at),
            values=self.values.rows().take(at, axis=0),
            slots={name: column.rows().take(at, axis=0) for name, column in self.slots.items()},
            counts=self.counts.rows().take(at),
            touched=self.touched.rows().take(at) - np.uint32(1),
        )

    def put(self, at: Slots, part: TablePart) -> None:
        """Writes ``part`` to the slots ``at``, which are distinct. The index is left as it is."""
        self.ids.rows()[at] = part.ids
        self.put_marks(at, part.counts, part.touched)
        scatter(self.values.rows(), at, part.values)
        for name, column in self.slots.items():
            scatter(column.rows(), at, part.slots[name])
