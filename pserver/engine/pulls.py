"""Reads of parameters: the newest values, kept snapshots, and rows of tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import check_values
from pserver.core.requests import LookedUp, PullRequest, PushRequest, RowsRequest, Values
from pserver.core.table_ids import check_tables, look_up_ids
from pserver.engine.gate import Gate
from pserver.engine.held_snapshots import SnapshotShelf
from pserver.engine.parameters import Parameters
from pserver.engine.pushes import Pushes
from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.tables import Ids


class Pulls:
    """Serves pulls. Not thread-safe: the engine holds the shard's lock, except for :meth:`check`
    and :meth:`check_rows`."""

    def __init__(
        self, plan: Plan, gate: Gate, held: Parameters, shelf: SnapshotShelf, pushes: Pushes
    ) -> None:
        self._plan = plan
        self._gate = gate
        self._held = held
        self._shelf = shelf
        self._pushes = pushes

    def check(
        self, request: PullRequest, into: tuple[npt.NDArray[np.float32], ...] | None
    ) -> RowsRequest | None:
        """Returns the rows that ``request`` asks for, to be written ``into`` these arrays; None if
        none.

        Raises:
            InvalidArgument: values cannot have this encoding; or see :meth:`check_rows`.
        """
        check_values(request.encoding)
        if not request.rows and not request.rows_only:
            return None
        # First, since a request of another plan has other tables.
        self._gate.admit_worker(request)
        return self.check_rows(RowsRequest(request.rows, into, request.rows_only))

    def check_rows(self, rows: RowsRequest) -> RowsRequest:
        """Returns ``rows`` with arrays to read into.

        Raises:
            InvalidArgument: an unknown table, or ids that do not ascend or belong to another shard.
        """
        check_tables(self._plan, rows.ids)
        self._held.tables.check_ids(rows.ids)
        if rows.into is not None:
            return rows
        made = (
            np.empty((len(ids), self._plan.tables[table].width), np.float32)
            for table, ids in rows.ids
        )
        return replace(rows, into=tuple(made))

    def of_snapshot(self, name: str, encoding: Encoding, rows: RowsRequest | None) -> Values:
        """Returns the values of a kept snapshot.

        Raises:
            RoundPassed: it is not kept, or no longer.
            InvalidArgument: ``encoding`` is not plain.
        """
        if encoding != "plain":
            raise InvalidArgument(
                f"snapshot {name!r} was asked for as {encoding}; snapshots are kept plain"
            )
        kept = self._shelf.get(name)
        if rows is None:
            return kept.values
        assert rows.into is not None
        if kept.tables is not None:
            kept.tables.read(rows.ids, rows.into)
        arrays = {} if rows.only else kept.values.arrays
        return replace(kept.values, arrays=arrays, rows=rows.into)

    def newest(
        self, request: PushRequest | PullRequest, encoding: Encoding, rows: RowsRequest | None
    ) -> Values:
        """Returns the present values. Without rows, records that the worker computes from them."""
        if rows is not None:
            return self._newest_rows(rows, encoding)
        values = self._held.values(encoding)
        self._pushes.pulled(request.worker, values)
        return values

    def look_up(self, name: str, ids: Ids) -> LookedUp:
        """Returns the newest rows of a table.

        Raises:
            NotReady: there are no parameters.
            InvalidArgument: an unknown table, more rows than a message holds, or ids that do not
                ascend or belong to another shard.
        """
        self._gate.need_sound()
        self._gate.need_values()
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
        rows = self.check_rows(RowsRequest(((table, ids),), only=True))
        values = self._newest_rows(rows, "plain")
        present = self._held.tables[table].present(ids)
        return LookedUp(values.version, values.generation, values.rows[0], present)

    def _newest_rows(self, rows: RowsRequest, encoding: Encoding) -> Values:
        """Returns the present rows, with the values of the arenas unless ``rows.only``."""
        assert rows.into is not None
        held = self._held
        held.tables.read(rows.ids, rows.into)
        if rows.only:
            return Values(held.version, held.standing.generation, {}, encoding, rows.into)
        return replace(held.values(encoding), rows=rows.into)
