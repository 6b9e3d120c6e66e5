"""A copy-on-write view of a table at one moment, while the table itself changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.tables.hash_index import Slots
from pserver.tables.initial import InitialRows
from pserver.tables.memory import Column
from pserver.tables.part import Counted, Floats, TablePart
from pserver.tables.row_store import RowStore, newest
from psrpc.core.tables import Ids


class FrozenTable:
    """The rows of a table at the moment of :meth:`pserver.tables.table.Table.freeze`.

    Copy-on-write: the table calls :meth:`save` before it changes a row or fills a slot, and
    :meth:`save_removed` before it removes a row. So each row is either unchanged in the table or
    saved here.

    Not thread-safe: the caller holds the lock of the table for every call, and makes no calls after
    :meth:`close`.

    Attributes:
        version: the version of the table's last update before the freeze.
        nbytes: bytes of the saved rows. Any thread may read it.
    """

    def __init__(
        self,
        store: RowStore,
        initial: InitialRows,
        candidates: Callable[[], Counted],
        removals: Removals,
        evicted: tuple[tuple[int, TablePart], ...],
        version: int,
        let_go: Callable[[FrozenTable, int], None],
        closed: Callable[[FrozenTable], None],
    ) -> None:
        self._candidates = candidates
        self.version = version
        self._store = store
        self._initial = initial
        self._removals = removals
        self._evicted = evicted
        self._let_go = let_go
        self._none = store.part(np.empty(0, np.int64))
        self._closed: Callable[[FrozenTable], None] | None = closed
        self._rows = len(store)
        self._used = store.used
        widths = {name: column.row_nbytes // 4 for name, column in store.slots.items()}
        self._saved = RowStore(store.values.row_nbytes // 4, widths)
        # For each slot of the table: the slot of its saved row in `_saved`, plus one; 0 if the row
        # is not saved.
        self._places = Column(np.int32)
        for column in (*self._saved.columns, self._places):
            # Reserving takes only address space, and makes sure that saving cannot fail half-way.
            column.reserve(self._used)
        self._saved.index.reserve_space(self._rows)
        self.nbytes = self._saved.nbytes

    def __len__(self) -> int:
        """Rows."""
        return self._rows

    @property
    def candidates(self) -> Counted:
        """Ids that were counted and not admitted, unordered. Each access computes them again; the
        caller need not hold the lock for this."""
        return self._candidates()

    @property
    def slots(self) -> int:
        """Upper bound of the slots of its rows, exclusive."""
        return self._used

    def save(self, at: Slots) -> None:
        """Saves the slots ``at``, distinct, before their rows change or new rows fill them."""
        old = at[at < self._used]
        places = self._places.rows()
        old = old[places.take(old) == 0]
        saved = self._store.copy(old, self._saved)
        places[old] = saved + 1
        self.nbytes = self._saved.nbytes + 4 * self._saved.used

    def save_removed(self, at: Slots) -> None:
        """Saves the rows in the slots ``at``, distinct, before they are removed."""
        self.save(at)
        at = at[at < self._used]
        saved = self._places.rows().take(at).astype(np.int64) - 1
        keys = self._saved.ids.rows()
        ids = keys.take(saved)
        # Only rows that were not removed earlier, and only slots that had a row.
        first = self._saved.find(ids) < 0
        first &= self._saved.touched.rows().take(saved) > 0
        self._saved.index.insert(ids[first], saved[first], keys)

    def since(self, version: int, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int32]:
        """Returns the slots, ascending, of the rows touched after ``version``; with −1 of all rows.

        ``start`` and ``stop`` limit the range of slots, since a million of them take about 10 ms.
        """
        assert self._closed, "the frozen table is closed"
        stop = self._used if stop is None else min(stop, self._used)
        touched = self._store.touched.rows()[start:stop].copy()
        places = self._places.rows()[start:stop]
        ours = np.flatnonzero(places)
        touched[ours] = self._saved.touched.rows().take(places[ours] - 1)
        slots = np.flatnonzero(touched > max(version + 1, 0))
        slots += start
        return slots.astype(np.int32)

    def block(self, slots: npt.NDArray[np.int32]) -> TablePart:
        """Returns the rows in ``slots``, a result of :meth:`since`, in their order."""
        assert self._closed, "the frozen table is closed"
        at = slots.astype(np.int64)
        part = self._store.part(at)
        places = self._places.rows().take(at)
        changed = np.flatnonzero(places)
        if len(changed):
            _overwrite(part, changed, self._saved.part(places[changed].astype(np.int64) - 1))
        return part

    def column(self, name: str, slots: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """Returns one column of :meth:`block`: ``ids``, ``values``, ``counts``, ``touched``, or
        ``slot/SLOT``. Files need this, because they store one column after the other."""
        assert self._closed, "the frozen table is closed"
        at = slots.astype(np.int64)
        column = self._store.column(name, at)
        places = self._places.rows().take(at)
        changed = np.flatnonzero(places)
        if len(changed):
            column[changed] = self._saved.column(name, places[changed].astype(np.int64) - 1)
        return column

    def removed_since(self, version: int) -> Ids | None:
        """Returns the ids, ascending, that were removed after ``version`` and have no row here.
        Returns None if the table no longer knows them all; a checkpoint then has to store all
        rows."""
        removed = self._removals.since(version)
        return removed if removed is None else removed[~self.present(removed)]

    def evicted(self, after: int) -> TablePart:
        """Returns the rows that versions later than ``after`` evicted, ids ascending; with −1 all
        kept ones. If an id was evicted several times, returns its last row. Empty without
        ``keep_evicted``.

        The caller need not hold the lock, since these rows never change.
        """
        assert self._closed, "the frozen table is closed"
        return newest((part for at, part in self._evicted if at > after), self._none)

    def let_go_evicted(self, version: int) -> None:
        """Lets the table drop the rows that were evicted by ``version`` or earlier ones, because a
        committed checkpoint contains them. Has no effect after :meth:`Table.forget`."""
        self._let_go(self, version)

    def present(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Returns which of ``ids`` have a row, ``[n]``."""
        at, saved = self._find(ids)
        return (at >= 0) | (saved >= 0)

    def read(self, ids: Ids, into: Floats) -> None:
        """Writes the rows of ``ids`` to ``into``, ``[n, width]``; initial values if absent."""
        at, saved = self._find(ids)
        np.take(self._store.values.rows(), at, axis=0, out=into, mode="clip")
        ours = np.flatnonzero(saved >= 0)
        if len(ours):
            into[ours] = self._saved.values.rows().take(saved[ours], axis=0)
        absent = np.flatnonzero((at < 0) & (saved < 0))
        self._initial.fill_to(ids[absent], absent, into)

    def close(self) -> None:
        """Frees the saved rows and stops the table from saving more. Idempotent."""
        if self._closed is not None:
            self._closed(self)
            self._closed = None
            del self._saved, self._places, self._store, self._evicted

    def _find(self, ids: Ids) -> tuple[Slots, Slots]:
        """Returns for each id the slot of its unchanged row in the table, and the slot of its saved
        row in ``_saved``; at least one of the two is −1."""
        assert self._closed, "the frozen table is closed"
        at = self._store.find(ids)
        at[at >= self._used] = -1
        saved = self._places.rows().take(at, mode="clip").astype(np.int64) - 1
        saved[at < 0] = -1
        # Excludes new rows: at the freeze their slots had another row, or none.
        new = self._saved.ids.rows().take(saved, mode="clip") != ids
        new |= self._saved.touched.rows().take(saved, mode="clip") == 0
        new &= saved >= 0
        at[new] = saved[new] = -1
        if len(self._saved.index):
            gone = np.flatnonzero(at < 0)
            saved[gone] = self._saved.find(ids[gone])
        at[saved >= 0] = -1
        return at, saved


def _overwrite(part: TablePart, at: Slots, other: TablePart) -> None:
    pairs: list[tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]] = [
        (part.ids, other.ids),
        (part.values, other.values),
        (part.counts, other.counts),
        (part.touched, other.touched),
        *((part.slots[name], other.slots[name]) for name in part.slots),
    ]
    for ours, theirs in pairs:
        ours[at] = theirs


class Removals:
    """Removed ids by the version that removed them. Drops the oldest if there are more than
    ``limit``.

    Knows nothing about removals before the first version passed to :meth:`begin`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._removed: deque[tuple[int, Ids]] = deque()
        self._known_from: int | None = None
        self._ids = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return 8 * self._ids

    def begin(self, version: int) -> None:
        """Notes that an update makes ``version``."""
        if self._known_from is None:
            self._known_from = version - 1

    def add(self, version: int, ids: Ids) -> None:
        """Notes that ``version`` removed ``ids``."""
        self._removed.append((version, ids))
        self._ids += len(ids)
        while self._ids > self._limit:
            self._known_from, forgotten = self._removed.popleft()
            self._ids -= len(forgotten)

    def copy(self) -> Removals:
        """Returns a copy that later removals do not change; it shares the arrays of ids."""
        other = Removals(self._limit)
        other._removed = self._removed.copy()
        other._known_from, other._ids = self._known_from, self._ids
        return other

    def since(self, version: int) -> Ids | None:
        """Returns the ids removed after ``version``, ascending; None if it does not know them
        all."""
        if self._known_from is not None and version < self._known_from:
            return None
        removed = [ids for at, ids in self._removed if at > version]
        return np.unique(np.concatenate(removed)) if removed else np.empty(0, np.int64)
