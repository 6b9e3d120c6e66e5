"""The rows that a worker asks of one shard, and the memory that receives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pserver.core.table_ids import TableIds, pairs
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.tables import Ids, Rows

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RowsWanted:
    """Ids of one shard, and the arrays to receive their rows.

    Attributes:
        ids: table -> int64 ``[n]``, strictly ascending, all of the shard; n may be 0.
        into: table -> contiguous float32 ``[n, width]``. Arrays in the memory that worker and shard
            share (:attr:`pserver.transport.workspace.Workspace.row_sets`) are filled in place;
            otherwise all values, also of the arenas, come in chunks.
        rows_only: pull no arena.
    """

    ids: Mapping[int, Ids]
    into: Mapping[int, FloatArray] = field(repr=False)
    rows_only: bool = False

    @cached_property
    def pairs(self) -> TableIds:
        """The tables that have ids."""
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
