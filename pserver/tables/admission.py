"""Decides when an id of a table gets a row, and how many rows there may be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pserver.tables.candidates import Candidates
from pserver.tables.part import Counted, Counts
from pserver.tables.row_store import RowStore
from psrpc.core.errors import ResourceExhausted, TableFull
from psrpc.core.tables import Ids, TableSpec

MAX_CANDIDATES = 1 << 22
"""Maximum number of ids without a row that a shard counts."""

CANDIDATES_PER_ROW = 4
"""Maximum number of such ids for each row that a table with ``max_rows`` may have."""

_MAX_SLOTS = 2**31 - 2


class Admission:
    """Admits ids into the part of table ``spec`` that ``shard`` of ``shards`` holds.

    An id gets a row after ``min_count`` pushes that name it, if there are fewer than ``max_rows``
    rows. Until then it is a candidate: its pushes are counted. Not thread-safe, but any thread may
    read ``dropped`` and ``nbytes``, which are then approximate.

    Attributes:
        limit: maximum number of rows of the part.
    """

    def __init__(self, spec: TableSpec, shard: int, shards: int) -> None:
        self.limit = _MAX_SLOTS if spec.max_rows is None else -(-spec.max_rows // shards)
        self._spec = spec
        self._shard, self._shards = shard, shards
        self._candidates = Candidates(min(MAX_CANDIDATES, CANDIDATES_PER_ROW * self.limit))

    @property
    def dropped(self) -> int:
        """Number of candidates whose counts were dropped to count other ids, because there were
        more than :data:`MAX_CANDIDATES`, or with ``max_rows`` more than :data:`CANDIDATES_PER_ROW`
        allows."""
        return self._candidates.dropped

    @property
    def nbytes(self) -> int:
        """Bytes of the candidates."""
        return self._candidates.nbytes

    def forget(self) -> None:
        """Drops all candidates."""
        self._candidates.clear()

    def check(self, ids: Ids, store: RowStore) -> None:
        """Checks that a push of ``ids`` fits into the part, whose rows ``store`` holds.

        Raises:
            TableFull: they do not fit; the message says how to fix it.
        """
        if self._spec.eviction is not None:
            self._check_named(len(ids))
        elif len(store) + len(ids) > self.limit:
            self._check_new(ids[store.find(ids) < 0], len(store))

    def check_room(self, named: int, absent: Ids, rows: int) -> None:
        """Does the same check as :meth:`check` for a caller that has looked up the ids already.

        Args:
            named: number of ids in the push.
            absent: the ids of the push that have no row.
            rows: number of rows of the part.
        """
        if self._spec.eviction is not None:
            self._check_named(named)
        elif rows + len(absent) > self.limit:
            self._check_new(absent, rows)

    def reserve(self, absent: Ids) -> None:
        """Reserves memory to count ``absent``. Raises OSError if there is none."""
        if self._spec.min_count > 1:
            self._candidates.reserve(absent)

    def admit(self, absent: Ids, version: int) -> tuple[npt.NDArray[np.bool_], Counts]:
        """Counts a push that names the ids ``absent``, which have no rows, and makes ``version``.

        Returns:
            Which of the ids get a row, ``[n]``, and for these the number of pushes that have named
            each.
        """
        if self._spec.min_count == 1:
            return np.ones(len(absent), np.bool_), np.ones(len(absent), np.uint32)
        return self._candidates.count(absent, self._spec.min_count, version)

    def candidates(self) -> Counted:
        """Returns the candidates with their counts, unordered."""
        return self._candidates.items()

    def freeze(self) -> Callable[[], Counted]:
        """Freezes the candidates, see :meth:`pserver.tables.candidates.Candidates.freeze`."""
        return self._candidates.freeze()

    def load(self, counted: Counted) -> None:
        """Loads candidates of a checkpoint.

        Raises:
            ResourceExhausted: no memory; the candidates are unchanged.
        """
        try:
            self._candidates.load(counted)
        except OSError as error:
            raise ResourceExhausted(
                f"table {self._spec.name!r}: no memory for {len(counted.ids)} ids that are counted "
                f"on shard {self._shard} ({error}); use more shards"
            ) from error

    def _check_named(self, named: int) -> None:
        """Checks that one push to a table with eviction fits. The push may replace all rows, but
        must not name more ids than the part may have rows."""
        if named > self.limit:
            raise TableFull(
                f"table {self._spec.name!r} has at most {self.limit} rows on {self._where()} "
                f"(max_rows={self._spec.max_rows}), but one update has {named}; raise max_rows "
                "or use smaller batches"
            )

    def _check_new(self, absent: Ids, rows: int) -> None:
        new = self._admissible(absent)
        if new and rows + new > self.limit:
            raise TableFull(
                f"table {self._spec.name!r} is full: {self._where()} has {rows} rows of at most "
                f"{self.limit} (max_rows={self._spec.max_rows}), and an update creates {new} more; "
                "raise max_rows or min_count, or set eviction to 'age' or 'frequency' with "
                "worker.Embedding(..., evict=...)"
            )

    def _admissible(self, absent: Ids) -> int:
        """Counts the rows that a push of ``absent`` ids would create."""
        if self._spec.min_count == 1:
            return len(absent)
        return int(np.count_nonzero(self._candidates.admissible(absent, self._spec.min_count)))

    def _where(self) -> str:
        return f"shard {self._shard} of {self._shards}"
