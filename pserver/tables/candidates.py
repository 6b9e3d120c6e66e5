"""Counts of ids that have no row yet (``min_count``), and the choice of rows to evict."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pserver.tables.hash_index import Slots
from pserver.tables.part import Counted, Counts
from pserver.tables.row_store import NEWEST, IdStore
from psrpc.core.tables import Eviction, Ids, mix

_NEVER = np.uint64(2**64 - 1)
_NONE: Slots = np.empty(0, np.int64)


class Candidates:
    """Counts the applied pushes for each id that is not admitted yet. Not thread-safe.

    Keeps at most ``limit`` ids. When there are more, it drops the ids with the smallest counts
    (among equal counts those named longest ago) until a sixteenth of the limit is free.

    Attributes:
        dropped: number of ids dropped to make room.
    """

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self.clear()

    def __len__(self) -> int:
        return len(self._store)

    @property
    def nbytes(self) -> int:
        """Bytes of the candidates and their index."""
        return self._store.nbytes

    def clear(self) -> None:
        """Drops all candidates."""
        self._store = IdStore()

    def admissible(self, ids: Ids, min_count: int) -> npt.NDArray[np.bool_]:
        """Returns which of ``ids`` would be admitted by one more push, ``[n]``."""
        return self._next(self._store.find(ids)) >= min_count

    def reserve(self, ids: Ids) -> None:
        """Makes room for those of ``ids`` that are new. Raises OSError as
        :meth:`IdStore.reserve`."""
        self._store.reserve(ids[self._store.find(ids) < 0])

    def count(self, ids: Ids, min_count: int, version: int) -> tuple[npt.NDArray[np.bool_], Counts]:
        """Counts one push that names ``ids``, which have no rows.

        Returns:
            Which of the ids the push admits, ``[n]``, and the counts of the admitted ids. Admitted
            ids are no longer candidates.
        """
        store = self._store
        at = store.find(ids)
        counts = self._next(at)
        admitted = counts >= min_count
        known = at >= 0
        store.touch(at[known & ~admitted], version)
        store.remove(at[known & admitted])
        new = ~known & ~admitted
        store.add(ids[new], counts[new], version)
        self._forget()
        return admitted, counts[admitted]

    def items(self) -> Counted:
        """Copies all candidates, unordered."""
        return self.freeze()()

    def freeze(self) -> Callable[[], Counted]:
        """Returns a function that returns the present :meth:`items`. It may be called later, in any
        thread.

        Copies the columns now: 16 bytes per candidate, which takes 5 ms for 4 million on an idle
        machine and 20 ms on a busy one. The returned function filters the copy, which takes two to
        three times as long.
        """
        store = self._store
        ids, counts, touched = (column.rows()[: store.used].copy() for column in store.columns)

        def items() -> Counted:
            at = np.flatnonzero(touched)
            return Counted(ids.take(at), counts.take(at), touched.take(at) - np.uint32(1))

        return items

    def load(self, counted: Counted) -> None:
        """Adds ``counted``, or replaces the counts of those ids. Raises OSError as
        :meth:`IdStore.reserve`."""
        self.reserve(counted.ids)
        store = self._store
        at = store.find(counted.ids)
        new = at < 0
        at[new] = store.add(counted.ids[new], counted.counts[new], 0)
        store.put_marks(at, counted.counts, counted.touched)
        self._forget()

    def _next(self, at: Slots) -> Counts:
        counts: Counts = self._store.counts.rows().take(at, mode="clip")
        counts[at < 0] = 0
        counts += counts < NEWEST
        return counts

    def _forget(self) -> None:
        over = len(self._store) - self._limit
        if over > 0:
            rows = over + self._limit // 16
            self.dropped += rows
            self._store.remove(victims(self._store, "frequency", rows, _NONE))


def victims(store: IdStore, eviction: Eviction, rows: int, spared: Slots) -> Slots:
    """Selects the slots of ``rows`` rows to evict. At least that many rows must lie outside
    ``spared``, which are distinct slots.

    ``age`` selects the rows touched longest ago, among equals those with the smallest count.
    ``frequency`` selects the rows with the smallest count, among equals those touched longest ago.
    The hash of the id breaks remaining ties, so that the choice depends only on the content of the
    table, not on its history.
    """
    touched = store.touched.rows()[: store.used]
    counts = store.counts.rows()[: store.used]
    first, second = (touched, counts) if eviction == "age" else (counts, touched)
    keys = first.astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= second
    keys[touched == 0] = _NEVER
    keys[spared] = _NEVER
    highest = np.partition(keys, rows - 1)[rows - 1]
    assert highest != _NEVER, "more rows are to be evicted than there are"
    sure = np.flatnonzero(keys < highest)
    ties = np.flatnonzero(keys == highest)
    needed = rows - len(sure)
    if needed < len(ties):
        hashes = mix(store.ids.rows()[ties])
        ties = ties[np.argpartition(hashes, needed - 1)[:needed]]
    return np.concatenate([sure, ties])
