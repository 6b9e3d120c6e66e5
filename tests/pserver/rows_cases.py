"""Tables to test shards with, and a plain model of what they should hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.client.client import ShardClient
from pserver.client.requests import GradientPush, Source
from pserver.core.table_ids import RowsWanted
from pserver.tables.table import Table
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Gradient
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from psrpc.core.tables import Ids, Rows, TableSpec, shard_of
from psrpc.v1 import types_pb2 as types
from tests.pserver.shards import SGD, NDArray, SharingClient, fence_of, leased, part, signed, whole
from tests.pserver.tables.table_cases import UNIFORM

USER, ITEM = 0, 1
WIDTHS = (4, 3)

FloatArray = npt.NDArray[np.float32]


def tables(**change: Any) -> tuple[TableSpec, TableSpec]:
    """``user`` of any ids, ``item`` of a vocabulary of 1000; ``change`` is of ``user``."""
    user = TableSpec("user", 4, None, UNIFORM, SGD, seed=1)
    return replace(user, **change), TableSpec("item", 3, 1000, UNIFORM, SGD, seed=2)


def tables_plan(shards: int = 1, *, arenas: bool = True, **change: Any) -> Plan:
    """Both tables beside 96 trainable elements, or alone."""
    variables = [VariableSpec("dense/kernel", (96,), "float32", "trainable")] if arenas else []
    return make_plan(variables, shards, "cut", tables(**change))


def ids_of(seed: int, n: int = 12, shard: int = 0, shards: int = 1) -> Ids:
    """Ascending ids below 1000 that live on ``shard``; not all different between seeds."""
    drawn = np.random.default_rng(seed).permutation(1000)
    mine = drawn[shard_of(drawn, shards) == shard]
    return np.sort(mine[:n]).astype(np.int64)


def gradients_of(seed: int, n: int = 12, shard: int = 0, shards: int = 1) -> dict[int, Rows]:
    """Gradients of ``n`` rows of each table."""
    rng = np.random.default_rng(seed)
    return {
        table: Rows(
            ids_of(seed + table, n, shard, shards), rng.normal(size=(n, width)).astype(np.float32)
        )
        for table, width in enumerate(WIDTHS)
    }


class Model:
    """Model of the tables: every gradient is subtracted from its row."""

    def __init__(self, plan: Plan) -> None:
        self._fresh = [Table(spec, 0, 1) for spec in plan.tables]
        self._rows: dict[tuple[int, int], FloatArray] = {}

    def read(self, table: int, ids: Ids) -> FloatArray:
        """``[n, width]``."""
        into = np.empty((len(ids), WIDTHS[table]), np.float32)
        # Nothing is ever applied to it.
        self._fresh[table].read(ids, into)
        for at, one in enumerate(ids.tolist()):
            into[at] = self._rows.get((table, one), into[at])
        return into

    def subtract(self, gradients: Mapping[int, Rows], weight: float = 1.0) -> None:
        for table, rows in gradients.items():
            new = self.read(table, rows.ids) - np.float32(weight) * rows.values
            for one, row in zip(rows.ids.tolist(), new, strict=True):
                self._rows[table, one] = row

    def has(self, table: int, ids: Ids) -> NDArray:
        return np.array([(table, one) in self._rows for one in ids.tolist()])


def wanting(
    client: ShardClient, ids: Mapping[int, Ids], *, rows_only: bool = False, second: bool = False
) -> RowsWanted:
    """Rows to pull, into the segment of a client that has one with room for them."""
    area = np.empty(0, np.uint8)
    if isinstance(client, SharingClient):
        area = client.workspace.row_sets[second]
    into: dict[int, FloatArray] = {}
    # Not on a boundary of 64 bytes: the shard only copies there.
    at = 4
    for table, of_table in ids.items():
        shape = (len(of_table), WIDTHS[table])
        nbytes = shape[0] * shape[1] * 4
        if at + nbytes <= area.nbytes:
            into[table] = area[at : at + nbytes].view(np.float32).reshape(shape)
        else:
            into[table] = np.empty(shape, np.float32)
        into[table].fill(np.nan)
        at += nbytes
    return RowsWanted(ids, into, rows_only)


def pulled_rows(
    client: ShardClient,
    ids: Mapping[int, Ids],
    source: Source = None,
    decision: types.Decision | None = None,
) -> dict[int, FloatArray]:
    """Rows alone."""
    wanted = wanting(client, ids, rows_only=True)
    proven = None if decision is None else signed(decision)
    client.pull(fence_of(client), source, {}, proven, wanted)
    return {table: array.copy() for table, array in wanted.into.items()}


def push_of(
    plan: Plan,
    batch: BatchId,
    rows: Mapping[int, Rows] | None,
    *,
    attempt: int = 1,
    base: int = 0,
    shard: int = 0,
    generation: int = 1,
) -> GradientPush:
    """A gradient whose arenas are all 1."""
    gradient: Gradient = part(plan, whole(plan, 1.0), shard)
    return leased("worker-1", batch, attempt, base, gradient, rows, generation=generation)


def assert_rows(found: Mapping[int, FloatArray], model: Model, ids: Mapping[int, Ids]) -> None:
    for table, of_table in ids.items():
        np.testing.assert_array_equal(found[table], model.read(table, of_table))
