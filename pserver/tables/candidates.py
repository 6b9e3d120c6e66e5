"""Ids that have been counted and have no row yet (``min_count``)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pserver.tables.hash_index import Slots
from pserver.tables.id_store import NEWEST, IdStore
from pserver.tables.part import Counted, Counts
from psrpc.core.tables import Eviction, Ids, mix

_NEVER = np.uint64(2**64 - 1)


_NONE: Slots = np.empty(0, np.int64)


class Candidates:
    """How many applied pushes have named each id that is not admitted yet.

    At most ``limit`` are remembered. When there are more, those with the least count are forgotten,
    so many that a sixteenth of the limit is free; of equal counts those named longest ago.
    Not thread-safe.

    Attributes:
        dropped: ids that were forgotten to make room, since this was made.
    """

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self.clear()

    def __len__(self) -> int:
        return len(self._store)

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered, with its index."""
        return self._store.nbytes

    def clear(self) -> None:
        """Remembers none."""
        self._store = IdStore()

    def admissible(self, ids: Ids, min_count: int) -> npt.NDArray[np.bool_]:
        """Which of ``ids`` one more push would admit, ``[n]``."""
        return self._next(self._store.find(ids)) >= min_count

    def reserve(self, ids: Ids) -> None:
        """Makes room for those of ``ids`` that are new. Raises OSError as :meth:`IdStore.reserve`
        does."""
        self._store.reserve(ids[self._store.find(ids) < 0])

    def count(self, ids: Ids, min_count: int, version: int) -> tuple[npt.NDArray[np.bool_], Counts]:
        """Counts one push that names ``ids``, which have no rows.

        Returns:
            Which of them it admits, ``[n]``, and the count of each of those. They are candidates
            no longer.
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
        """Copies all of them, in no order."""
        return self.freeze()()

    def freeze(self) -> Callable[[], Counted]:
        """What finds the :meth:`items` of now, later on and in any thread.

        The columns are copied at once: 16 bytes a candidate, of 4 million in 5 ms where nothing
        else runs and 20 ms on a busy machine. To find in them those that are there takes two to
        three times as long.
        """
        store = self._store
        ids, counts, touched = (column.rows()[: store.used].copy() for column in store.columns)

        def items() -> Counted:
            at = np.flatnonzero(touched)
            return Counted(ids.take(at), counts.take(at), touched.take(at) - np.uint32(1))

        return items

    def load(self, counted: Counted) -> None:
        """Remembers ``counted`` in place of what it has of these ids. Raises OSError as
        :meth:`IdStore.reserve` does."""
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
    """The slots of ``rows`` rows to evict; none of ``spared``, distinct slots, is among them.

    ``age``: those touched longest ago, of these the ones with the least count; ``frequency``: those
    with the least count, of these the ones touched longest ago. Beyond that the hash of the id
    decides, so that the choice depends on what the table holds and not on how it came there.
    There must be that many.
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
