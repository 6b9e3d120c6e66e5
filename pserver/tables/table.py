"""One shard's part of an embedding table, see docs/design/0010-embedding-tables.md."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pserver.tables.admission import Admission
from pserver.tables.candidates import victims
from pserver.tables.frozen import FrozenTable, Removals
from pserver.tables.hash_index import Slots
from pserver.tables.initial import InitialRows
from pserver.tables.part import (
    Counted,
    Counts,
    Floats,
    TablePart,
    check_gradients,
    check_ids,
    check_part,
)
from pserver.tables.row_store import Evicted, RowStore
from pserver.tables.row_update import RowUpdate, Scratch
from psrpc.core.errors import ResourceExhausted
from psrpc.core.tables import Ids, Rows, TableSpec
from psrpc.ops.lanes import in_lanes

_MAX_REMOVED = 1 << 22


class Table:
    """The rows of table ``spec`` whose ids belong to ``shard`` of ``shards``.

    Not thread-safe, frozen tables included: the caller holds the shard's lock. Any thread may read
    the figures (the attributes, ``len`` and ``nbytes``), which are then approximate.

    All methods take ids as int64 ``[n]``, distinct, and values as float32 ``[n, width]``.

    Attributes:
        admission: decides which ids get rows; has the candidates.
        created: rows created by pushes.
        evicted: rows removed to make room.
        version: the last version that touched a row or a candidate.

    Raises:
        InvalidJob: the optimizer or the initializer is invalid.
    """

    def __init__(
        self, spec: TableSpec, shard: int, shards: int, scratch: Scratch | None = None
    ) -> None:
        """``scratch`` is shared by all tables of the shard. If it is None, the table makes its
        own."""
        self.spec = spec
        self.created = 0
        self.evicted = 0
        self._shard, self._shards = shard, shards
        self.admission = Admission(spec, shard, shards)
        self._initial = InitialRows(spec)
        self._update = RowUpdate(spec, scratch or Scratch())
        self._evicted = Evicted()
        self.forget()

    def __len__(self) -> int:
        """Rows."""
        return len(self._store)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, slots, index, candidates, kept evicted rows and frozen tables."""
        own = self._store.nbytes + self.admission.nbytes
        kept = self._removals.nbytes + self._evicted.nbytes
        return own + kept + sum(frozen.nbytes for frozen in self._frozen)

    def forget(self) -> None:
        """Drops all rows, candidates and evicted rows. Frozen tables keep their own."""
        self._store = RowStore(self.spec.width, self._update.slot_widths, self.spec.vocabulary)
        self.admission.forget()
        self._removals = Removals(min(_MAX_REMOVED, max(1 << 16, 2 * self.admission.limit)))
        self._evicted.clear()
        self.version = 0
        self._frozen: list[FrozenTable] = []

    def present(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Returns which of ``ids`` have a row, ``[n]``."""
        return self._store.find(ids) >= 0

    def read(self, ids: Ids, into: Floats) -> None:
        """Writes the rows of ``ids`` to ``into``, and initial values for ids without a row. Creates
        no row."""
        at = self._store.find(ids)
        values = self._store.values.rows()

        def read(_lane: int, part: slice) -> None:
            np.take(values, at[part], axis=0, out=into[part], mode="clip")

        in_lanes(len(at), self._store.values.row_nbytes, read)
        absent = np.flatnonzero(at < 0)
        self._initial.fill_to(ids[absent], absent, into)

    def check_ids(self, ids: Ids) -> None:
        """Checks the ids of a request.

        Raises:
            InvalidArgument: the ids do not ascend strictly, or an id belongs to another shard or is
                outside the vocabulary. Names the table and the id.
        """
        check_ids(self.spec, self._shard, self._shards, ids)

    def check(self, rows: Rows) -> None:
        """Checks that :meth:`apply` can apply ``rows``: valid ids (see :meth:`check_ids`), finite
        gradients, and enough room.

        Raises:
            InvalidArgument: names the table, the id and the expected value.
            TableFull: the table is full and does not evict, or ``rows`` exceed its maximum. The
                message says how to fix it.
        """
        self.check_ids(rows.ids)
        check_gradients(self.spec, rows)
        self.admission.check(rows.ids, self._store)

    def prepare(self, ids: Ids) -> Slots:
        """Makes room for an update of ``ids``. The table must not change between this and that
        update.

        Returns:
            The slots of the rows, −1 for missing ones; an argument of :meth:`apply`.

        Raises:
            ResourceExhausted: no room or no memory; the table is unchanged.
        """
        at = self._store.find(ids)
        absent = ids[at < 0]
        self.admission.check_room(len(ids), absent, len(self))
        self._reserve(absent)
        return at

    def apply(
        self,
        rows: Rows,
        rate_scale: float,
        iterations: int,
        version: int,
        at: Slots | None = None,
    ) -> None:
        """Updates the table to ``version`` with gradients that passed :meth:`check`.

        Creates missing rows whose ids have reached ``min_count``. ``iterations`` is the number of
        updates before this one, for schedules and Adam. ``at`` is the result of :meth:`prepare`, if
        the caller has called that; this method changes the array.

        Raises:
            ResourceExhausted: as in :meth:`prepare`; cannot happen if ``at`` is given.
        """
        store, ids = self._store, rows.ids
        if at is None:
            at = self.prepare(ids)
        absent = np.flatnonzero(at < 0)
        self._removals.begin(version)
        self.version = version
        known = at if not len(absent) else at[at >= 0]
        for frozen in self._frozen:
            frozen.save(known)
        store.touch(known, version)
        picked = None
        if len(absent):
            new, counts = self.admission.admit(ids[absent], version)
            self._make_room(len(counts), known, version)
            at[absent[new]] = self._create(ids[absent[new]], counts, version)
            if len(counts) < len(absent):
                picked = np.flatnonzero(at >= 0)
                at = at[picked]
        self._update.apply(store, at, rows.values, picked, rate_scale, iterations)

    def insert(self, part: TablePart) -> None:
        """Inserts rows of a checkpoint; they replace rows of the same ids.

        Evicts nothing, so a shard may exceed its part of ``max_rows`` until the next update evicts.

        Raises:
            CheckpointError: the rows have another width, optimizer or vocabulary; the table is
                unchanged.
            ResourceExhausted: no memory; the table is unchanged.
        """
        widths = {"values": self.spec.width, **self._update.slot_widths}
        check_part(self.spec.name, part, widths, self.spec.vocabulary)
        store = self._store
        at = store.find(part.ids)
        absent = np.flatnonzero(at < 0)
        self._reserve(part.ids[absent])
        for frozen in self._frozen:
            frozen.save(at[at >= 0])
        own = self._take(len(absent))
        at[absent] = store.add(part.ids[absent], part.counts[absent], 0, own)
        store.put(at, part)
        self.version = max(self.version, int(part.touched.max(initial=0)))

    def remove(self, ids: Ids) -> None:
        """Removes the rows of ``ids``, if they exist, while a checkpoint is loaded.
        :meth:`FrozenTable.removed_since` does not list these."""
        at = self._store.find(ids)
        self._remove(at[at >= 0])

    def load_candidates(self, counted: Counted) -> None:
        """Loads candidates of a checkpoint.

        Raises:
            ResourceExhausted: no memory; the table is unchanged.
        """
        self.admission.load(counted)
        # The next version has to be newer than those of the candidates, too.
        self.version = max(self.version, int(counted.touched.max(initial=0)))

    def freeze(self) -> FrozenTable:
        """Returns a view of the present table; the caller has to close it. Cheap, except for the
        copy of the candidates, see :meth:`pserver.tables.candidates.Candidates.freeze`."""
        frozen = FrozenTable(
            self._store,
            self._initial,
            self.admission.freeze(),
            self._removals.copy(),
            self._evicted.parts(),
            self.version,
            self._let_go,
            self._closed,
        )
        self._frozen.append(frozen)
        return frozen

    def let_go_evicted(self, version: int) -> None:
        """Drops the kept rows that were evicted by ``version`` or earlier ones, because a committed
        checkpoint contains them."""
        self._evicted.let_go(version)

    @property
    def evicted_dropped(self) -> int:
        """Number of evicted rows dropped before a checkpoint contained them, because more than
        :data:`pserver.tables.row_store.MAX_NBYTES` were evicted between two checkpoints."""
        return self._evicted.dropped

    def _let_go(self, frozen: FrozenTable, version: int) -> None:
        # A view from before `forget` is no longer in the list; its versions refer to other rows.
        if any(other is frozen for other in self._frozen):
            self.let_go_evicted(version)

    def _closed(self, frozen: FrozenTable) -> None:
        self._frozen = [other for other in self._frozen if other is not frozen]

    def _reserve(self, absent: Ids) -> None:
        try:
            self._store.reserve(absent)
            self.admission.reserve(absent)
        except OSError as error:
            raise ResourceExhausted(
                f"table {self.spec.name!r}: no memory for {len(absent)} rows beside {len(self)} on "
                f"shard {self._shard} ({error}); use more shards, or max_rows with evict"
            ) from error

    def _create(self, ids: Ids, counts: Counts, version: int) -> Slots:
        store = self._store
        at = store.add(ids, counts, version, self._take(len(ids)))
        self.created += len(at)
        self._initial.fill_to(ids, at, store.values.rows())
        for name, first in self._update.slots.items():
            store.slots[name].rows()[at] = first
        return at

    def _take(self, rows: int) -> Slots:
        """Takes slots for new rows."""
        at = self._store.take(rows)
        for frozen in self._frozen:
            frozen.save(at)
        return at

    def _make_room(self, new: int, known: Slots, version: int) -> None:
        """Evicts rows to make room for ``new`` ones; does not evict the slots ``known``."""
        over = len(self) + new - self.admission.limit
        if over <= 0 or self.spec.eviction is None:
            return
        # Evicts a sixteenth of the rows at a time, because selecting a few takes as long as
        # selecting many.
        rows = min(max(over, self.admission.limit // 16), len(self) - len(known))
        at = victims(self._store, self.spec.eviction, rows, known)
        if self.spec.keep_evicted:
            self._evicted.add(version, self._store, at)
        self._removals.add(version, self._store.ids.rows().take(at))
        self.evicted += rows
        self._remove(at)

    def _remove(self, at: Slots) -> None:
        for frozen in self._frozen:
            frozen.save_removed(at)
        self._store.remove(at)
