"""Rows that a shard's tables begin with, of another job's checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pserver.tables.part import TablePart
from pserver.tables.row_update import RowUpdate, Scratch
from pserver.tables.tables import Tables
from psrpc.first_rows import load_first_rows
from psrpc.plan import Plan
from psrpc.rows_chain import Removed
from psrpc.rows_reader import RowsBlock
from psrpc.storage import DISK, Storage


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
