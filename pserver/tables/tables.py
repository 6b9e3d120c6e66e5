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
"""Numbers of tables in the plan, each with ids."""


@dataclass(frozen=True)
class TableFigures:
    """Figures of one shard's part of a table, see :class:`pserver.tables.table.Table`.

    Since the shard started, ``created``, ``evicted`` and ``evicted_dropped`` count rows, and
    ``candidates_dropped`` counts ids."""

    name: str
    rows: int
    nbytes: int
    created: int
    evicted: int
    evicted_dropped: int
    candidates_dropped: int


class FrozenTables:
    """All tables at one moment, in the plan's order. Not thread-safe: the caller holds the shard's
    lock."""

    def __init__(self, tables: tuple[FrozenTable, ...]) -> None:
        self.tables = tables

    def read(self, wanted: Wanted, into: Sequence[Floats]) -> None:
        """Does :meth:`Tables.read` on the tables of that moment."""
        for (table, ids), rows in zip(wanted, into, strict=True):
            self.tables[table].read(ids, rows)

    def close(self) -> None:
        """Closes all tables. Idempotent."""
        for table in self.tables:
            table.close()


class TablesUpdate:
    """An update for which all its tables have room. It must be their next change."""

    def __init__(self, parts: Sequence[tuple[Table, Rows, Slots]]) -> None:
        self.parts = parts

    def apply(self, rate_scale: float, iterations: int, version: int) -> None:
        """Updates each table once, see :meth:`Table.apply`."""
        for table, rows, at in self.parts:
            table.apply(rows, rate_scale, iterations, version, at)


class Tables:
    """The tables of ``plan`` on one shard, by their number in the plan; there may be none. Not
    thread-safe: the caller holds the shard's lock.

    Attributes:
        specs: the plan's table specs; none on a slice, which has no rows.
        tables: one for each spec.

    Raises:
        InvalidJob: an optimizer or an initializer is invalid.
    """

    def __init__(self, plan: Plan, shard: int) -> None:
        self.specs = plan.tables_on(shard)
        scratch = Scratch()
        self.tables = tuple(Table(spec, shard, plan.row_shards, scratch) for spec in self.specs)

    def __getitem__(self, table: int) -> Table:
        """Returns table number ``table``; raises InvalidArgument if the shard does not have it."""
        if not 0 <= table < len(self.tables):
            raise InvalidArgument(f"table {table} is unknown; this shard has {len(self.tables)}")
        return self.tables[table]

    def read(self, wanted: Wanted, into: Sequence[Floats]) -> None:
        """Writes the rows of each table's ids to its array of ``into``, ``[n, width]``; initial
        values for absent rows."""
        for (table, ids), rows in zip(wanted, into, strict=True):
            self[table].read(ids, rows)

    def check_ids(self, wanted: Wanted) -> None:
        """Checks the tables and ids of a request. Raises InvalidArgument for an unknown or repeated
        table, and for wrong ids as :meth:`Table.check_ids`."""
        named = [table for table, _ in wanted]
        for table, ids in wanted:
            self[table].check_ids(ids)
            if named.count(table) > 1:
                raise InvalidArgument(f"table {self.specs[table].name!r} is named more than once")

    def check(self, rows: Mapping[int, Rows]) -> None:
        """Checks the arguments of :meth:`apply`. Raises the errors of :meth:`Table.check`."""
        for table, gradients in rows.items():
            self[table].check(gradients)

    def apply(
        self, rows: Mapping[int, Rows], rate_scale: float, iterations: int, version: int
    ) -> None:
        """Updates each table in ``rows`` with gradients that passed :meth:`check`.

        Raises:
            ResourceExhausted: no room or no memory; the tables are unchanged.
        """
        self.prepare(rows).apply(rate_scale, iterations, version)

    def prepare(self, rows: Mapping[int, Rows]) -> TablesUpdate:
        """Makes room in all tables for an update with ``rows``, which passed :meth:`check`.

        Raises:
            ResourceExhausted: no room or no memory; the tables are unchanged.
        """
        parts = [(self[table], part) for table, part in rows.items()]
        return TablesUpdate([(table, part, table.prepare(part.ids)) for table, part in parts])

    @property
    def version(self) -> int:
        """The last version that touched a row or a candidate of any table; 0 if none did."""
        return max((table.version for table in self.tables), default=0)

    def forget(self) -> None:
        """Drops all rows of all tables."""
        for table in self.tables:
            table.forget()

    def freeze(self) -> FrozenTables:
        """Returns a view of the present tables; the caller has to close it."""
        return FrozenTables(tuple(table.freeze() for table in self.tables))

    def figures(self) -> list[TableFigures]:
        """Returns the figures of each table. Thread-safe; without the lock they are
        approximate."""
        return [
            TableFigures(
                t.spec.name,
                len(t),
                t.nbytes,
                t.created,
                t.evicted,
                t.evicted_dropped,
                t.admission.dropped,
            )
            for t in self.tables
        ]
