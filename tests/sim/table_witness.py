"""Embedding tables whose rows show which records were trained, and how often.

``seen``: each record has a row of its own on every shard, and shares another with every second
record. The gradient of a batch is the number of its records that a row stands for, so at the end
every row holds how often its records were trained. ``pair``: one row for each shard, which gets the
opposite of what ``plus`` of the arenas gets, so the two sum to zero in everything that is of one
version. ``rare``: one row, touched by every update, that comes into being with the second. Of
``recent`` there are fewer rows than records: some make room for others, and may come again; where
a row takes two updates, so may ids that are counted.

With momentum the sum of all updates of a row is (1 - m) p + m v, as on arenas; but here only an
update that touches the row changes v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.core.table_ids import TableIds
from pserver.tables.frozen import FrozenTable
from pserver.tables.part import Counted, TablePart
from pserver.tables.tables import Tables
from psrpc.core.batch import BatchId
from psrpc.core.plan import Plan
from psrpc.core.tables import Eviction, Ids, TableSpec, mix, shard_of

NDArray = npt.NDArray[Any]

SEEN, PAIR, RARE, RECENT = range(4)

SHARED = 2
"""Rows of ``seen`` that records share; record n is in row n modulo this."""

COLUMNS = np.array([1.0, 2.0, -3.0], np.float32)
"""What a count is multiplied by in each column of ``seen``."""

INITIAL = np.float32(0.5)
"""Of every element of ``seen``."""

MIN_COUNT = 2
MOMENTUM = 0.5
VELOCITY = "momentums"

_EDGES = np.array([0, -1, 1, 2**63 - 1, -(2**63)], np.int64)


@dataclass(frozen=True)
class Recent:
    """The table ``recent``: record n has the id of n modulo ``recurring`` (0: each has its own), a
    row takes ``min_count`` updates to come into being."""

    recurring: int = 0
    min_count: int = 1
    eviction: Eviction = "frequency"


PLAIN = Recent()


def specs(
    number: int, optimizer: Mapping[str, Any], unit: int, most_rows: int, recent: Recent
) -> tuple[TableSpec, ...]:
    """The first ``number`` tables. A row of ``pair`` has ``unit`` elements; ``recent`` has at most
    ``most_rows`` rows, over all shards."""

    def constant(value: float) -> dict[str, Any]:
        return {"class_name": "constant", "config": {"value": value}}

    uniform = {"class_name": "uniform", "config": {"low": -1.0, "high": 1.0}}
    tables = (
        TableSpec("seen", len(COLUMNS), None, constant(float(INITIAL)), optimizer),
        TableSpec("pair", unit, None, constant(0.0), optimizer),
        TableSpec("rare", 1, None, constant(0.0), optimizer, min_count=MIN_COUNT),
        TableSpec(
            "recent",
            2,
            None,
            uniform,
            optimizer,
            seed=7,
            min_count=recent.min_count,
            max_rows=most_rows,
            eviction=recent.eviction,
        ),
    )
    return tables[:number]


@dataclass(frozen=True, eq=False)
class ShardIds:
    """Ids of one shard: ``own`` of each record, ``shared`` of some, and the one of the others."""

    own: Ids
    shared: Ids
    single: Ids


@lru_cache(maxsize=64)
def shard_ids(shards: int, records: int) -> tuple[ShardIds, ...]:
    """Ids for ``records`` records on each shard, in no order; those at the edges are among them."""
    need = records + SHARED + 1
    many = mix(np.arange(4 * need * shards + 64)).view(np.int64)
    ids = np.concatenate([_EDGES, many])
    owners = shard_of(ids, shards)
    found = []
    for shard in range(shards):
        mine = ids[owners == np.uint64(shard)][:need]
        assert len(mine) == need
        found.append(ShardIds(mine[1 + SHARED :], mine[1 : 1 + SHARED], mine[:1]))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Contents:
    """All that a table holds: rows, and ids that were counted, by ascending id."""

    rows: TablePart
    candidates: Counted

    def differs(self, other: Contents) -> str:
        """Names the values whose bits differ; empty if all agree."""
        pairs: list[tuple[str, NDArray, NDArray]] = [
            ("ids", self.rows.ids, other.rows.ids),
            ("values", self.rows.values, other.rows.values),
            ("counts", self.rows.counts, other.rows.counts),
            ("touched", self.rows.touched, other.rows.touched),
            ("candidates", self.candidates.ids, other.candidates.ids),
            ("their counts", self.candidates.counts, other.candidates.counts),
            ("their versions", self.candidates.touched, other.candidates.touched),
            *((slot, array, other.rows.slots[slot]) for slot, array in self.rows.slots.items()),
        ]
        for what, one, two in pairs:
            if one.shape != two.shape or one.tobytes() != two.tobytes():
                return f"{what} {one.tolist()}, expected {two.tolist()}"
        return ""


def contents(table: FrozenTable) -> Contents:
    """Content of a frozen table."""
    return _sorted(table.block(table.since(-1)), table.candidates)


def contents_now(tables: Tables) -> tuple[Contents, ...]:
    """Content of all tables of a shard. As `freeze` would say it, which takes longer."""
    found = []
    for table in tables.tables:
        store = table._store
        part = store.part(np.flatnonzero(store.touched.rows()[: store.used]))
        found.append(_sorted(part, table.admission.candidates()))
    return tuple(found)


def _sorted(part: TablePart, candidates: Counted) -> Contents:
    order = np.argsort(part.ids)
    by_id = np.argsort(candidates.ids)
    return Contents(
        TablePart(
            part.ids[order],
            part.values[order],
            {slot: array[order] for slot, array in part.slots.items()},
            part.counts[order],
            part.touched[order],
        ),
        Counted(
            candidates.ids[by_id],
            candidates.counts[by_id],
            candidates.touched[by_id],
        ),
    )


class TableWitness:
    """The tables of one job: the ids and gradients of its batches."""

    def __init__(
        self, plan: Plan, records: int, entries: Callable[[BatchId], slice], recurring: int
    ) -> None:
        """``records`` are of all epochs; ``entries`` says which of them a batch has."""
        self.ids = shard_ids(plan.row_shards, records)
        self._recurring = recurring or records
        self._tables = len(plan.tables)
        self._entries = entries

    def wanted(self, batch: BatchId, shard: int) -> TableIds:
        """The ids of a batch on a shard."""
        trained = np.zeros(len(self.ids[shard].own), np.bool_)
        trained[self._entries(batch)] = True
        return self._wanted(trained, shard)

    def every(self, shard: int) -> TableIds:
        """The ids of all records on a shard."""
        return self._wanted(np.ones(len(self.ids[shard].own), np.bool_), shard)

    def _wanted(self, trained: NDArray, shard: int) -> TableIds:
        ids = self.ids[shard]
        seen, _ = self.seen(trained, shard)
        of = (seen, ids.single, ids.single, self._recent(trained, shard))
        return tuple(enumerate(of[: self._tables]))

    def gradients(
        self, batch: BatchId, shard: int, plus: NDArray, scale: float | None
    ) -> tuple[NDArray, ...]:
        """Of the rows of :meth:`wanted`, ``[n, width]``.

        Args:
            plus: the gradient of the arenas' variable of that name.
            scale: undoes the weight that the batch has in its round. None: it is not known, and
                :class:`tests.sim.shard.CountingTables` does.
        """
        trained = np.zeros(len(self.ids[shard].own), np.bool_)
        trained[self._entries(batch)] = True
        _, counts = self.seen(trained, shard)
        # Its weight divided by its records is the same for all batches of a round.
        by = np.float32(1.0 / batch.count if scale is None else scale)
        of = (
            -(counts * by)[:, None] * COLUMNS,
            -plus[None, :],
            np.full((1, 1), -1.0, np.float32),
            np.full((len(self._recent(trained, shard)), 2), -1.0, np.float32),
        )
        return of[: self._tables]

    def _recent(self, trained: NDArray, shard: int) -> Ids:
        which = np.unique(np.flatnonzero(trained) % self._recurring)
        return np.sort(self.ids[shard].own[which])

    def seen(self, trained: NDArray, shard: int) -> tuple[Ids, NDArray]:
        """Rows of ``seen`` once these records were ``trained``, a mask: the ids, ascending, and how
        many records each stands for, float32."""
        ids = self.ids[shard]
        own = np.flatnonzero(trained)
        shared = np.bincount(own % SHARED, minlength=SHARED)
        there = np.flatnonzero(shared)
        found = np.concatenate([ids.own[own], ids.shared[there]])
        counts = np.concatenate([np.ones(len(own)), shared[there]]).astype(np.float32)
        order = np.argsort(found)
        return found[order], counts[order]
