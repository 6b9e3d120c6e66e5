"""All embedding tables of one shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pserver.tables.frozen import FrozenTable
from pserver.tables.hash_index import Slots
from pserver.tables.part import Floats
from pserver.tables.row_update import Scratch
from pserver.tables.table import Table
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.tables import Ids, Rows

Wanted = Sequence[tuple[int, Ids]]
"""Tables by their number in the plan, and ids of each."""


@dataclass(frozen=True)
class TableFigures:
    """One table's part of a shard. ``nbytes``: of rows, slots, index and all that is kept beside
    them. ``created``, ``evicted`` and ``evicted_dropped`` count rows since the shard started,
    ``candidates_dropped`` ids; see :class:`pserver.tables.table.Table`."""

    name: str
    rows: int
    nbytes: int
    created: int
    evicted: int
    evicted_dropped: int
    candidates_dropped: int


class FrozenTables:
    """All tables as they were at one moment, in the plan's order. As :class:`FrozenTable`: not
    thread-safe, the caller holds the shard's lock."""

    def __init__(self, tables: tuple[FrozenTable, ...]) -> None:
        self.tables = tables

    def read(self, wanted: Wanted, into: Sequence[Floats]) -> None:
        """As :meth:`Tables.read`, of that moment."""
        for (table, ids), rows in zip(wanted, into, strict=True):
            self.tables[table].read(ids, rows)

    def close(self) -> None:
        """Ends the promise. A second time changes nothing."""
        for table in self.tables:
            table.close()


class TablesUpdate:
    """An update that all of its tables have room for. Nothing may happen to them before it."""

    def __init__(self, parts: Sequence[tuple[Table, Rows, Slots]]) -> None:
        self.parts = parts

    def apply(self, rate_scale: float, iterations: int, version: int) -> None:
        """Updates each table, once. See :meth:`Table.apply`."""
        for table, rows, at in self.parts:
            table.apply(rows, rate_scale, iterations, version, at)


class Tables:
    """The tables of ``shard`` of ``plan``, by their number in it; there may be none.

    Not thread-safe: the caller holds the shard's lock.

    Attributes:
        specs: of the plan.
        tables: one for each.

    Raises:
        InvalidJob: an optimizer or an initializer cannot be.
    """

    def __init__(self, plan: Plan, shard: int) -> None:
        self.specs = plan.tables
        scratch = Scratch()
        self.tables = tuple(Table(spec, shard, plan.shards, scratch) for spec in plan.tables)

    def __getitem__(self, table: int) -> Table:
        """Raises InvalidArgument for a number that the plan has not."""
        if not 0 <= table < len(self.tables):
            raise InvalidArgument(f"table {table} is unknown; the plan has {len(self.tables)}")
        return self.tables[table]

    def read(self, wanted: Wanted, into: Sequence[Floats]) -> None:
        """Writes the rows of each table's ids to its array of ``into``, ``[n, width]``; of absent
        rows the initial values."""
        for (table, ids), rows in zip(wanted, into, strict=True):
            self[table].read(ids, rows)

    def check_ids(self, wanted: Wanted) -> None:
        """Raises InvalidArgument: an unknown table, one that is named twice, or ids as in
        :meth:`Table.check_ids`."""
        named = [table for table, _ in wanted]
        for table, ids in wanted:
            self[table].check_ids(ids)
            if named.count(table) > 1:
                raise InvalidArgument(f"table {self.specs[table].name!r} is named more than once")

    def check(self, rows: Mapping[int, Rows]) -> None:
        """Passes what :meth:`apply` takes. Raises as :meth:`Table.check`."""
        for table, gradients in rows.items():
            self[table].check(gradients)

    def apply(
        self, rows: Mapping[int, Rows], rate_scale: float, iterations: int, version: int
    ) -> None:
        """One update of each table that ``rows`` has gradients for; comes after :meth:`check`.

        Raises:
            ResourceExhausted: there is no room or no memory. Nothing was changed.
        """
        self.prepare(rows).apply(rate_scale, iterations, version)

    def prepare(self, rows: Mapping[int, Rows]) -> TablesUpdate:
        """Makes room for an update with ``rows``, which :meth:`check` has passed, in all tables.

        Raises:
            ResourceExhausted: there is no room or no memory. Nothing was changed.
        """
        parts = [(self[table], part) for table, part in rows.items()]
        return TablesUpdate([(table, part, table.prepare(part.ids)) for table, part in parts])

    @property
    def version(self) -> int:
        """The last that has touched a row or a candidate of any table; 0 where none has."""
        return max((table.version for table in self.tables), default=0)

    def forget(self) -> None:
        """Drops all rows of all tables."""
        for table in self.tables:
            table.forget()

    def freeze(self) -> FrozenTables:
        """All tables as they are now; to be closed."""
        return FrozenTables(tuple(table.freeze() for table in self.tables))

    def figures(self) -> list[TableFigures]:
        """What is told of each table. Any thread may ask: the lock need not be held, and then the
        figures are of about now."""
        return [
            TableFigures(
                t.spec.name,
                len(t),
                t.nbytes,
                t.created,
                t.evicted,
                t.evicted_dropped,
                t.candidates_dropped,
            )
            for t in self.tables
        ]
