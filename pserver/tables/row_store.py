"""The ids and rows of a table, column by column, and its evicted rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.tables.hash_index import HashIndex, Slots
from pserver.tables.memory import Column, scatter
from pserver.tables.part import Counts, TablePart
from psrpc.core.tables import Ids

MAX_VOCABULARY = 1 << 24
"""Maximum vocabulary for which a table uses a direct index. A direct index takes 4 bytes per id of
the vocabulary, even for ids without a row, so at most 64 MiB. Tables with larger vocabularies use
the hash index."""

NEWEST = 2**32 - 2
"""The highest version and count stored; higher ones are clamped to it."""


class IdStore:
    """Stores ids by slot number and finds the slot of each id. Not thread-safe.

    Attributes:
        ids: int64.
        counts: uint32, the number of applied pushes that named the id.
        touched: uint32, the version that named the id last, plus one; 0 in a slot without an id.
        used: number of slots ever given out; later slots have no id.
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
        """Returns the slot of each id, −1 for absent ids."""
        return self.index.find(ids, self.ids.rows())

    def reserve(self, ids: Ids) -> None:
        """Makes room for ``ids``, which are distinct and absent, so that adding them needs no more
        address space.

        Raises:
            OSError: the kernel grants no more address space; the store is unchanged.
        """
        for column in self.columns:
            column.reserve(self.used + len(ids))
        self.index.reserve(ids, self.ids.rows())

    def take(self, rows: int) -> Slots:
        """Gives out ``rows`` slots, beginning with those of removed ids. Call :meth:`reserve`
        before."""
        old = self._free[:0]
        if len(self._free):
            old, self._free = np.split(self._free, [min(rows, len(self._free))])
        fresh = rows - len(old)
        self.used += fresh
        new = np.arange(self.used - fresh, self.used)
        return np.concatenate([old, new]) if len(old) else new

    def add(self, ids: Ids, counts: Counts, version: int, at: Slots | None = None) -> Slots:
        """Adds ``ids``, which are distinct and absent, to the slots ``at`` from :meth:`take`, or to
        new slots if that is None. Returns their slots."""
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
        """Counts one more push, which makes ``version``, for the ids in the slots ``at``."""
        counts = self.counts.rows()
        named: Counts = counts.take(at)
        named += named < NEWEST
        counts[at] = named
        self.touched.rows()[at] = stored(version)


def stored(version: int) -> np.uint32:
    """Converts ``version`` to its form in the column ``touched``."""
    return np.uint32(min(version, NEWEST) + 1)


class DirectIndex:
    """Maps ids from 0 to ``vocabulary - 1`` to slots; same interface as
    :class:`pserver.tables.hash_index.HashIndex`. Many times as fast as that, since it accesses
    memory in order for ascending ids. Not thread-safe."""

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
        """Bytes of the pages ever written, an upper bound of the memory that the index occupies.
        Pages stay when their ids are removed."""
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


MAX_NBYTES = 32 << 20
"""Maximum bytes of evicted rows that a shard keeps for one table."""

_PIECES = 8
"""Minimum number of pieces in a full store of evicted rows, which drops whole pieces to make
room."""


class RowStore(IdStore):
    """An :class:`IdStore` whose ids have rows.

    Attributes:
        values: float32 ``[capacity, width]``.
        slots: optimizer slot -> float32 ``[capacity, width or 1]``.
    """

    def __init__(
        self, width: int, slot_widths: Mapping[str, int], vocabulary: int | None = None
    ) -> None:
        """``vocabulary`` is the upper bound of ids, exclusive; None if ids may be any int64."""
        super().__init__()
        if vocabulary is not None and vocabulary <= MAX_VOCABULARY:
            self.index = DirectIndex(vocabulary)
        self.values = Column(np.float32, width)
        self.slots = {name: Column(np.float32, wide) for name, wide in slot_widths.items()}
        self.columns = (*self.columns, self.values, *self.slots.values())

    def copy(self, at: Slots, into: RowStore) -> Slots:
        """Appends the rows in the slots ``at`` to ``into``, from which no row was ever removed and
        which has room for them. Returns their slots there. Does not change the index of
        ``into``."""
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
    """Keeps the latest evicted rows, up to :data:`MAX_NBYTES`, with the version that evicted them.

    Attributes:
        dropped: number of rows dropped before a checkpoint contained them.
        nbytes: bytes of the kept rows.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.nbytes = 0
        self._parts: deque[tuple[int, int, TablePart]] = deque()  # version, bytes, rows

    def add(self, version: int, store: RowStore, at: Slots) -> None:
        """Copies the rows of ``store`` in the slots ``at``, before ``version`` evicts them. Drops
        the oldest rows if there are more than :data:`MAX_NBYTES`."""
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
    """Merges ``parts``, given oldest first, by ascending id. If an id occurs several times, its
    last row is kept. ``empty`` has no rows and defines the columns."""
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
