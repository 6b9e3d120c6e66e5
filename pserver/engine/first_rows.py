"""Reads the first rows of a shard's tables from another job's checkpoint."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

import numpy as np

from pserver.tables.part import TablePart
from pserver.tables.row_update import RowUpdate, Scratch
from pserver.tables.tables import Tables
from psrpc.checkpoint.initial_values import checkpoint_here, load_first_rows, row_files
from psrpc.checkpoint.rows_chain import Removed
from psrpc.checkpoint.rows_reader import RowsBlock
from psrpc.core.errors import NotReady
from psrpc.core.plan import Plan
from psrpc.files.storage import DISK, Storage
from psrpc.files.urls import is_url


class FirstRows:
    """Reads the first rows of the tables once. Thread-safe.

    The coordinator supplies the path. A worker only triggers the read and cannot choose the path,
    because text from workers must never become a path."""

    def __init__(self, source: str, plan: Plan, shard: int) -> None:
        """``source`` is a directory or a URL. If it is empty, tables begin without rows."""
        self._source = source
        self._plan = plan
        self._shard = shard
        self._lock = Lock()
        self._tables: Tables | None = None

    def load(self, timeout_s: float) -> Tables | None:
        """Returns the tables, or None if they begin without rows. Keeps the tables until
        :meth:`forget`, so that a caller that ran out of time gets them at once when it retries.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
            InvalidJob: a table has another width there, or the store cannot be used.
            NotReady: another call has been reading for ``timeout_s``.
            ResourceExhausted: out of memory.
        """
        if not self._source or not self._plan.tables_on(self._shard):
            return None
        if not self._lock.acquire(timeout=timeout_s):
            raise NotReady(
                f"shard {self._shard} reads the first rows of its tables from {self._source};"
                f" that took more than {timeout_s:.1f} s"
            )
        try:
            if self._tables is None:
                tables = Tables(self._plan, self._shard)
                if is_url(self._source):
                    with checkpoint_here(self._source, row_files) as copy:
                        fill_first_rows(tables, copy, self._plan, self._shard)
                else:
                    fill_first_rows(tables, Path(self._source), self._plan, self._shard)
                self._tables = tables
            return self._tables
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Drops the reference to the tables; the shard owns and changes them now."""
        self._tables = None


def fill_first_rows(
    tables: Tables, directory: Path, plan: Plan, shard: int, storage: Storage = DISK
) -> None:
    """Fills empty tables with the rows of a checkpoint, as if updates had just created these rows:
    the optimizer's slots get their initial values. After an error the tables are empty again.

    Raises:
        CheckpointError: the files are damaged or are not a checkpoint.
        InvalidJob: a table has another width there.
        ResourceExhausted: out of memory.
    """
    updates = [RowUpdate(spec, Scratch()) for spec in plan.tables]
    try:
        for number, step in load_first_rows(
            directory, plan.tables, shard, plan.row_shards, storage
        ):
            if isinstance(step, Removed):
                tables[number].remove(step.ids)
            else:
                count = plan.tables[number].min_count
                tables[number].insert(_part(step, updates[number], count))
    except BaseException:
        tables.forget()
        raise


def _part(rows: RowsBlock, update: RowUpdate, count: int) -> TablePart:
    n = len(rows.ids)
    slots = {
        name: np.full((n, update.slot_widths[name]), first, np.float32)
        for name, first in update.slots.items()
    }
    counts, touched = np.full(n, count, np.uint32), np.zeros(n, np.uint32)
    return TablePart(rows.ids, rows.values, slots, counts, touched)
