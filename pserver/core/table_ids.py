"""Table ids as messages carry them, the checks that need no table, and memory for their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import Extent
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.tables import MAX_IDS, Ids, Rows
from psrpc.v1 import types_pb2 as types

TableIds = tuple[tuple[int, Ids], ...]
"""Pairs of a table's index in the plan and int64 ``[n]`` ids, n >= 1; tables ascend."""

LOOK_UP_BYTES = 4 << 20
"""Maximum bytes of rows per look-up; a message may have 8 MiB."""

_ID_BYTES = 8
_ELEMENT_BYTES = 4


def pairs(ids: Mapping[int, Ids]) -> TableIds:
    """Converts ids by table to pairs; leaves out tables without ids."""
    return tuple((table, ids[table]) for table in sorted(ids) if len(ids[table]))


def count(rows: TableIds) -> int:
    """Number of ids over all tables."""
    return sum(len(ids) for _, ids in rows)


def add_table_ids(field: Any, rows: TableIds) -> None:
    """Adds ids to a repeated ``field`` of a message. Adding in place saves a copy of each
    submessage.

    Raises:
        InvalidArgument: more ids than one message may name.
    """
    named = count(rows)
    if named > MAX_IDS:
        raise InvalidArgument(
            f"a batch has {named} ids of tables for one shard; expected at most {MAX_IDS}: use"
            " smaller batches, or more shards"
        )
    for table, ids in rows:
        field.add(table=table, ids=ids.astype("<i8", copy=False).tobytes())


def from_table_ids(messages: Iterable[types.TableIds]) -> TableIds:
    """The inverse of :func:`add_table_ids`. The arrays are read-only.

    Raises:
        InvalidArgument: tables that do not ascend, malformed or empty ids, or too many.
    """
    rows: list[tuple[int, Ids]] = []
    for message in messages:
        if rows and message.table <= rows[-1][0]:
            raise InvalidArgument(
                f"ids of table {message.table} come after those of table {rows[-1][0]}; expected"
                " tables in ascending order, each once"
            )
        rows.append((message.table, from_bytes(message.ids, f"table {message.table}")))
    result = tuple(rows)
    if count(result) > MAX_IDS:
        raise InvalidArgument(f"a message names {count(result)} ids; expected at most {MAX_IDS}")
    return result


def from_bytes(data: bytes, what: str) -> Ids:
    """Decodes packed little-endian int64 into an array ``[n]``, n >= 1; ``what`` names it in
    errors.

    Raises:
        InvalidArgument: the length is 0 or not a multiple of 8.
    """
    if not data or len(data) % _ID_BYTES:
        raise InvalidArgument(
            f"the ids of {what} have {len(data)} bytes; expected a multiple of {_ID_BYTES}, and at"
            " least one id"
        )
    return np.frombuffer(data, "<i8")


def look_up_ids(width: int) -> int:
    """Maximum number of rows of ``width`` elements per look-up."""
    return max(1, LOOK_UP_BYTES // (_ELEMENT_BYTES * width + _ID_BYTES))


def check_tables(plan: Plan, rows: TableIds) -> None:
    """Checks that the plan has all named tables.

    Raises:
        InvalidArgument: the plan has no such table.
    """
    if rows and rows[-1][0] >= len(plan.tables):
        raise InvalidArgument(
            f"ids of table {rows[-1][0]} are named; the plan has {len(plan.tables)} tables"
        )


def row_extents(plan: Plan, rows: TableIds) -> list[Extent]:
    """Returns the extents that a header announces for ``rows``. Call :func:`check_tables` first."""
    first = len(plan.arenas)
    return [
        Extent(first + table, len(ids) * plan.tables[table].width * _ELEMENT_BYTES, "plain")
        for table, ids in rows
    ]


def check_row_extents(plan: Plan, extents: Sequence[Extent], rows: TableIds) -> None:
    """Compares the row extents of a header with its ids; call it before allocating anything.

    Raises:
        InvalidArgument: an unknown table, a missing extent, or one of another length.
    """
    check_tables(plan, rows)
    expected = row_extents(plan, rows)
    if len(extents) != len(expected):
        raise InvalidArgument(
            f"the stream announces {len(extents)} extents of rows; it names ids of {len(rows)}"
            " tables"
        )
    for announced, extent, (table, ids) in zip(extents, expected, rows, strict=True):
        name = plan.tables[table].name
        if announced.arena != extent.arena:
            raise InvalidArgument(
                f"the stream announces extent {announced.arena}; expected {extent.arena}, the rows"
                f" of table {name!r}"
            )
        if announced != extent:
            raise InvalidArgument(
                f"the stream announces {announced.nbytes} bytes of table {name!r} as"
                f" {announced.encoding}; expected {extent.nbytes} as plain, {len(ids)} rows"
            )


FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RowsWanted:
    """Ids of one shard, and the arrays to receive their rows.

    Attributes:
        ids: table -> int64 ``[n]``, strictly ascending, all of the shard; n may be 0.
        into: table -> contiguous float32 ``[n, width]``. Arrays in the memory that worker and shard
            share (:attr:`pserver.transport.workspace.Workspace.row_sets`) are filled in place. If
            the arrays lie elsewhere, all values arrive in chunks, including those of the arenas.
        rows_only: pull no arena.
    """

    ids: Mapping[int, Ids]
    into: Mapping[int, FloatArray] = field(repr=False)
    rows_only: bool = False

    @cached_property
    def pairs(self) -> TableIds:
        """The ids as pairs, without the tables that have none."""
        return pairs(self.ids)

    def check(self, plan: Plan) -> None:
        """Checks that the arrays have the shapes of the plan's tables.

        Raises:
            InvalidArgument: names the table and the mismatch.
        """
        for table, ids in self.pairs:
            check_rows(plan, table, ids, self.into[table])
            if not self.into[table].flags.c_contiguous:
                raise InvalidArgument(f"table {plan.tables[table].name!r}: rows are not contiguous")


def check_rows(plan: Plan, table: int, ids: Ids, values: FloatArray) -> None:
    """Checks that there is one row for each id.

    Raises:
        InvalidArgument: names the table and the mismatch.
    """
    spec = plan.tables[table]
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise InvalidArgument(
            f"the ids of table {spec.name!r} are {ids.dtype}{list(ids.shape)}; expected int64[n]"
        )
    if values.dtype != np.float32 or values.shape != (len(ids), spec.width):
        raise InvalidArgument(
            f"the array for rows of table {spec.name!r} is {values.dtype}{list(values.shape)};"
            f" expected float32[{len(ids)}, {spec.width}]"
        )


def pushed_pairs(plan: Plan, rows: Mapping[int, Rows] | None) -> TableIds:
    """Returns the ids of pushed rows after checking their shapes.

    Raises:
        InvalidArgument: names the table and the mismatch.
    """
    if not rows:
        return ()
    for table, of_table in rows.items():
        check_rows(plan, table, of_table.ids, of_table.values)
    return pairs({table: of_table.ids for table, of_table in rows.items()})
