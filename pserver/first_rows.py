"""Rows that a shard's tables begin with, of another job's checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from threading import Lock

import numpy as np

from pserver.tables.part import TablePart
from pserver.tables.row_update import RowUpdate, Scratch
from pserver.tables.tables import Tables
from psrpc.first_rows import load_first_rows
from psrpc.plan import Plan
from psrpc.remote_checkpoint import checkpoint_here, row_files
from psrpc.rows_chain import Removed
from psrpc.rows_reader import RowsBlock
from psrpc.storage import DISK, Storage
from psrpc.urls import is_url


class FirstRows:
    """Where the checkpoint lies whose rows tables begin with. Thread-safe.

    Of what a URL names there is a copy, made once however often it is asked for: a caller whose
    patience ends while it is made asks again.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._copies = ExitStack()
        self._found: dict[str, Path] = {}

    def directory(self, rows_from: str) -> Path:
        """The directory for ``rows_from``, a path or a URL.

        Raises:
            CheckpointError: there is no checkpoint.
            InvalidJob: the store cannot be used.
        """
        if not is_url(rows_from):
            return Path(rows_from)
        with self._lock:
            if rows_from not in self._found:
                self._found[rows_from] = self._copies.enter_context(
                    checkpoint_here(rows_from, row_files)
                )
            return self._found[rows_from]

    def forget(self) -> None:
        """Removes the copies."""
        with self._lock:
            self._found.clear()
            self._copies.close()


def fill_first_rows(
    tables: Tables, directory: Path, plan: Plan, shard: int, storage: Storage = DISK
) -> None:
    """Puts the values of a checkpoint's rows into tables that are empty: as if updates had created
    these rows just now, with the optimizer's slots as they begin. After an error they are empty
    again.

    Raises:
        CheckpointError: the files are damaged, or no checkpoint.
        InvalidJob: a table has another width there.
        ResourceExhausted: there is no memory.
    """
    updates = [RowUpdate(spec, Scratch()) for spec in plan.tables]
    try:
        for number, step in load_first_rows(directory, plan.tables, shard, plan.shards, storage):
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
