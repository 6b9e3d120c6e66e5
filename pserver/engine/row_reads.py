"""What is read of a shard's tables: the newest rows, those of a kept snapshot, and look-ups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pserver.core.requests import LookedUp, RowsRequest, Values
from pserver.core.table_ids import check_tables, look_up_ids
from pserver.engine.held_snapshots import Kept
from pserver.engine.parameters import Parameters
from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.tables import Ids


class RowReads:
    """Reads rows into the arrays of a request. Not thread-safe: the shard's engine holds its lock,
    but for :meth:`checked`, which is asked without."""

    def __init__(self, plan: Plan, held: Parameters) -> None:
        self._plan = plan
        self._held = held

    def checked(self, rows: RowsRequest) -> RowsRequest:
        """``rows`` with arrays to put them into.

        Raises:
            InvalidArgument: an unknown table, or ids that do not ascend or are not this shard's.
        """
        check_tables(self._plan, rows.ids)
        self._held.tables.check_ids(rows.ids)
        if rows.into is not None:
            return rows
        widths = [self._plan.tables[table].width for table, _ in rows.ids]
        made = (
            np.empty((len(ids), width), np.float32)
            for (_, ids), width in zip(rows.ids, widths, strict=True)
        )
        return replace(rows, into=tuple(made))

    def newest(self, rows: RowsRequest, encoding: Encoding) -> Values:
        """The rows as they are now, with the values of the arenas if those are wanted."""
        assert rows.into is not None
        held = self._held
        held.tables.read(rows.ids, rows.into)
        if rows.only:
            return Values(held.version, held.standing.generation, {}, encoding, rows.into)
        return replace(held.values(encoding), rows=rows.into)

    @staticmethod
    def of_kept(rows: RowsRequest, kept: Kept) -> Values:
        """The same of a snapshot."""
        assert rows.into is not None
        if kept.tables is not None:
            kept.tables.read(rows.ids, rows.into)
        arrays = {} if rows.only else kept.values.arrays
        return replace(kept.values, arrays=arrays, rows=rows.into)

    def look_up(self, name: str, ids: Ids) -> LookedUp:
        """The newest rows of a table.

        Raises:
            InvalidArgument: there is no such table, more rows than a message holds, or ids that do
                not ascend or are not this shard's.
        """
        names = [table.name for table in self._plan.tables]
        if name not in names:
            raise InvalidArgument(
                f"there is no table {name!r}; the job's tables are: {', '.join(names) or 'none'}"
            )
        table = names.index(name)
        most = look_up_ids(self._plan.tables[table].width)
        if len(ids) > most:
            raise InvalidArgument(
                f"{len(ids)} ids of table {name!r} are looked up; expected at most {most}"
            )
        rows = self.checked(RowsRequest(((table, ids),), only=True))
        values = self.newest(rows, "plain")
        present = self._held.tables[table].present(ids)
        return LookedUp(values.version, values.generation, values.rows[0], present)
