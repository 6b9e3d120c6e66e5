"""Encodes rows for streams and messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from pserver.core.requests import LookedUp
from pserver.core.table_ids import TableIds
from pserver.tables.tables import TableFigures
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.v1 import parameter_server_pb2 as pb


def pulled_parts(
    plan: Plan, rows: TableIds, arrays: Sequence[npt.NDArray[np.float32]]
) -> list[tuple[int, memoryview]]:
    """Pairs of extent index and bytes, from a contiguous ``[n, width]`` per table of ``rows``."""
    first = len(plan.arenas)
    return [
        (first + table, array.reshape(-1).view(np.uint8).data)
        for (table, _), array in zip(rows, arrays, strict=True)
    ]


def pushed_parts(
    plan: Plan, ids: TableIds, rows: Mapping[int, Rows]
) -> list[tuple[int, memoryview]]:
    """The same for pushed rows."""
    arrays = [np.ascontiguousarray(rows[table].values) for table, _ in ids]
    return pulled_parts(plan, ids, arrays)


def to_tables(figures: Iterable[TableFigures]) -> list[pb.TableStatus]:
    """Encodes figures of tables."""
    return [pb.TableStatus(**asdict(f)) for f in figures]


def to_looked_up(found: LookedUp) -> pb.LookUpResponse:
    """Encodes the result of a look-up."""
    return pb.LookUpResponse(
        version=found.version,
        generation=found.generation,
        rows=found.rows.tobytes(),
        present=found.present.astype(np.uint8).tobytes(),
    )
