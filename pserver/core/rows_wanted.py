"""The rows that a worker wants of one shard."""

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
    """Ids of one shard, and where their rows are to be put.

    Attributes:
        ids: table -> int64 ``[n]``, strictly ascending, all of the shard; n may be 0.
        into: table -> contiguous float32 ``[n, width]``. Anywhere in the memory that worker and
            shard share (:attr:`pserver.transport.workspace.Workspace.row_sets`), or elsewhere: then
            the values come in chunks, those of the arenas as well.
        rows_only: no arena is wanted.
    """

    ids: Mapping[int, Ids]
    into: Mapping[int, FloatArray] = field(repr=False)
    rows_only: bool = False

    @cached_property
    def pairs(self) -> TableIds:
        """Those tables of which there are ids."""
        return pairs(self.ids)

    def check(self, plan: Plan) -> None:
        """Passes arrays of the shapes that the plan's tables have.

        Raises:
            InvalidArgument: names the table and what is wrong.
        """
        for table, ids in self.pairs:
            check_rows(plan, table, ids, self.into[table])
            if not self.into[table].flags.c_contiguous:
                raise InvalidArgument(f"table {plan.tables[table].name!r}: rows are not contiguous")


def check_rows(plan: Plan, table: int, ids: Ids, values: FloatArray) -> None:
    """Passes one row for each id.

    Raises:
        InvalidArgument: names the table and what is wrong.
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
    """The ids of pushed rows, which are as many as there are ids.

    Raises:
        InvalidArgument: names the table and what is wrong.
    """
    if not rows:
        return ()
    for table, of_table in rows.items():
        check_rows(plan, table, of_table.ids, of_table.values)
    return pairs({table: of_table.ids for table, of_table in rows.items()})
