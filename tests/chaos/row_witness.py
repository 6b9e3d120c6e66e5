"""The embedding tables of the witness model, whose rows count the batches that name them.

Of ``growing`` each shard has a row for each batch, with ids all over int64, and one that every
batch names. Of ``fixed``, a table with a vocabulary, it has a few, of which each batch names one.
The gradient of a row is the same in all columns: minus one for the batch, times what undoes its
weight in a round. So with plain SGD a row is its initial value plus the number of its batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from psrpc.core.plan import Plan
from psrpc.core.tables import Ids, Rows, mix, shard_of
from tests.chaos.witness import INITIAL_ROW, VOCABULARY, Array, Options, Torn, scale
from worker.embedding.rows import RowsNeeded

GROWING, FIXED = 0, 1

SHARED = 4
"""Rows of ``fixed`` that each shard has; batch n names row n modulo this."""


@dataclass(frozen=True, eq=False)
class ShardIds:
    """The ids of one shard, ascending: in ``growing`` the id of each batch and, last, the one
    that every batch names."""

    growing: Ids
    fixed: Ids


@lru_cache(maxsize=8)
def shard_ids(shards: int, batches: int) -> tuple[ShardIds, ...]:
    """Of every shard, for so many batches."""
    ends = np.array([0, -1, 2**63 - 1, -(2**63)])
    many = np.concatenate([ends, mix(np.arange(4 * shards * (batches + 16))).view(np.int64)])
    few = np.arange(VOCABULARY)
    found = []
    for shard in range(shards):
        growing = many[shard_of(many, shards) == shard][: batches + 1]
        fixed = few[shard_of(few, shards) == shard][:SHARED]
        assert (len(growing), len(fixed)) == (batches + 1, SHARED)
        found.append(ShardIds(np.sort(growing), fixed))
    return tuple(found)


def every_row(options: Options) -> RowsNeeded:
    """All rows that there may be. Far more than a batch trains, so most of what is read first is
    absent."""
    found = shard_ids(options.shards, options.total_batches)
    ids = [[shard.growing for shard in found], [shard.fixed for shard in found]]
    needed = RowsNeeded(
        tuple(np.concatenate(of) for of in ids),
        tuple((0, *np.cumsum([len(part) for part in of]).tolist()) for of in ids),
    )
    return needed.with_slices(options.slices)


def row_gradients(options: Options, batch: int, shard: int) -> dict[int, Rows]:
    """The row gradients of ``batch`` for ``shard``; the batch's gradient is finite."""
    ids = shard_ids(options.shards, options.total_batches)[shard]
    named = ids.growing[[batch, -1]], ids.fixed[[batch % SHARED]]
    by = np.float32(-scale(options, batch))
    return {
        table: Rows(of, np.full((len(of), spec.width), by))
        for table, (of, spec) in enumerate(zip(named, options.tables, strict=True))
    }


def named_by(trained: Array) -> tuple[Array, Array]:
    """How many of the batches that were ``trained``, a mask, name each row of a shard: of
    ``growing`` and of ``fixed``, in the order of :class:`ShardIds`."""
    batches = np.flatnonzero(trained)
    every = np.append(trained.astype(np.int64), len(batches))
    return every, np.bincount(batches % SHARED, minlength=SHARED)


def check_rows(options: Options, rows: Sequence[Array], trained: Array | None = None) -> int:
    """Checks the invariants of all rows of one shard, read at once.

    Args:
        rows: of each table, ``[n, width]``, in the order of :class:`ShardIds`.
        trained: which batches the arenas of that version have, ``[batches]``; None: of which
            version the rows are is not known.

    Returns:
        How many batches the rows have.

    Raises:
        Torn: says what was found.
    """
    updates = [values[:, 0] - np.float32(INITIAL_ROW) for values in rows]
    for values in rows:
        if (values != values[:, :1]).any():
            raise Torn(f"a row has columns of two versions: {values.tolist()}")
    own = updates[GROWING][:-1] != 0
    expected = named_by(own)
    for name, found, counts in zip(("growing", "fixed"), updates, expected, strict=True):
        if options.optimizer == "sgd":
            wrong = np.flatnonzero(found != counts)
        else:
            wrong = np.flatnonzero((found != 0) != (counts != 0))
        if len(wrong):
            raise Torn(
                f"row {wrong[0]} of {name} has {found[wrong[0]]:g}; expected that of"
                f" {counts[wrong[0]]} batches"
            )
    if trained is not None and (own != trained).any():
        odd = np.flatnonzero(own != trained)[:8].tolist()
        raise Torn(f"rows and arenas differ in batches {odd}")
    return int(own.sum())


def shard_rows(plan: Plan, values: Sequence[Array], needed: RowsNeeded, shard: int) -> list[Array]:
    """The part of ``values``, one array ``[n, width]`` for each table, that is of ``shard``."""
    parts = needed.on_shard(shard)
    return [values[table][parts[table]] for table in range(len(plan.tables))]
