"""A model whose parameters show which records were trained, and how often.

Every shard that has a part of the arenas holds three variables. ``witness`` has one entry for each
record of each epoch; the gradient of a batch is not zero at its records alone, and the update adds
exactly 1 to their entries: it is scaled by what its weight in its round will be or, where that is
not known beforehand, made so by :class:`tests.sim.shard.CountingEngine`. ``plus`` and ``minus`` get
opposite gradients, which depend on the parameters that they were computed from. Delay compensation
changes no entry: those of a batch were not changed by others since it was pulled.

With momentum m = 1/2 the velocity v goes with the parameters p: v' = m v + u and p' = p + v', so
that the sum of all updates u is (1 - m) p + m v. All of these are exact in float32 here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pserver.core.staging import Part, mean_rows, weighted_mean
from pserver.tables.tables import Tables
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.batch import BatchId, cut_batch
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from psrpc.core.tables import Rows
from tests.sim.options import Options
from tests.sim.table_witness import PLAIN, Recent, TableWitness, specs

NDArray = npt.NDArray[Any]

UNIT = 16
"""Elements of 64 bytes: arenas are cut only between them."""

ARENA = "float32.trainable"
MOMENTUM = 0.5
FEEDBACK = 0.125


def optimizer(momentum: bool) -> dict[str, Any]:
    """SGD of rate 1, so that an update is the gradient's negative."""
    config: dict[str, Any] = {"learning_rate": 1.0}
    if momentum:
        config["momentum"] = MOMENTUM
    return {"class_name": "SGD", "config": config}


@lru_cache(maxsize=64)
def witness_plan(
    shards: int,
    records: int,
    tables: int = 0,
    momentum: bool = False,
    most_rows: int = 1,
    recent: Recent = PLAIN,
    slices: int = 0,
) -> Plan:
    """The same three variables on every shard, each of whole units; with ``slices`` on each of
    these, which follow the shards. ``records`` are of all epochs."""
    rows = -(-records // UNIT) * UNIT
    return make_plan(
        [
            VariableSpec(f"{name}_{shard}", (size,), "float32", "trainable")
            for shard in range(slices or shards)
            for name, size in (("witness", rows), ("plus", UNIT), ("minus", UNIT))
        ],
        shards + slices,
        "cut",
        specs(tables, optimizer(momentum), UNIT, most_rows, recent),
        slices,
    )


@dataclass(frozen=True)
class Places:
    """The parts of arenas and the rows on each shard of ``plan``."""

    plan: Plan

    @property
    def dense(self) -> range:
        """The shards with parts of the arenas."""
        return range(self.plan.row_shards if self.plan.slices else 0, self.plan.shards)

    @property
    def rows(self) -> range:
        """The shards with rows."""
        return range(self.plan.row_shards if self.plan.tables else 0)

    def part(self, arena: NDArray, shard: int) -> NDArray:
        """A view of a shard's part of the whole arena, which may be empty."""
        cuts = self.plan.arenas[0].cuts
        return arena[cuts[shard] : cuts[shard + 1]]

    def partner(self, shard: int) -> int:
        """The shard whose ``plus`` the rows of ``shard`` sum to zero with."""
        return self.dense[shard % len(self.dense)]


class Witness:
    """The model of one job, and what its parameters must be."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.records = records = options.records * options.epochs
        """Of all epochs."""
        self.place(hosted=options.hosted)
        self.tables = TableWitness(self.plan, records, self.entries, options.recent.recurring)
        self.batches = [
            cut_batch(epoch, index, options.records, options.batch_records)
            for epoch in range(options.epochs)
            for index in range(options.batches)
        ]
        self.skipped = frozenset(self.batches[index] for index in options.skipped)
        """The batches whose gradient is not finite."""
        self.rows = self.plan.arenas[0].shard_length(self.places.dense[0]) - 2 * UNIT
        self._noise = [
            np.random.default_rng(index).standard_normal(UNIT, np.float32) / 8
            for index in range(1, 4)
        ]

    def place(self, *, hosted: bool) -> None:
        """From now on workers host the arenas, or do not."""
        options = self.options
        self.plan = witness_plan(
            options.shards,
            self.records,
            options.tables,
            options.momentum,
            options.most_rows,
            options.recent,
            options.slices if hosted else 0,
        )
        self.places = Places(self.plan)

    def initial(self) -> NDArray:
        """``[arena length]``: no batch was trained."""
        return np.zeros(self.plan.arenas[0].length, np.float32)

    def gradient(self, batch: BatchId, mine: NDArray) -> NDArray | None:
        """A shard's part of the gradient, from its part of the arena; None when it is not
        finite."""
        if batch in self.skipped:
            return None
        gradient = np.zeros(len(mine), np.float32)
        if not len(mine):
            return gradient
        index = batch.first // self.options.batch_records
        scale = np.float32(self._scale(batch))
        gradient[self.entries(batch)] = -scale
        plus = gradient[self.rows : self.rows + UNIT]
        np.multiply(mine[self.rows : self.rows + UNIT], np.float32(FEEDBACK), out=plus)
        plus += self._noise[index % 3]
        plus *= scale
        np.negative(plus, out=gradient[self.rows + UNIT :])
        return gradient

    def row_gradients(self, batch: BatchId, gradient: NDArray, shard: int) -> tuple[NDArray, ...]:
        """Those of the tables' rows on ``shard``, which go with its or its partner's part of a
        gradient, see :meth:`TableWitness.gradients`."""
        plus = gradient[self.rows : self.rows + UNIT]
        scale = self._scale(batch) if self.options.known else None
        return self.tables.gradients(batch, shard, plus, scale)

    def entries(self, batch: BatchId) -> slice:
        """Where the records of a batch are in ``witness``."""
        first = batch.epoch * self.options.records + batch.first
        return slice(first, first + batch.count)

    def _scale(self, batch: BatchId) -> float:
        """The factor that undoes the weight of the batch in its round."""
        if not (self.options.known and self.options.policy.rounds):
            return 1.0
        return sum(other.count for other in self._round_of(batch)) / batch.count

    def _round_of(self, batch: BatchId) -> list[BatchId]:
        """The batches of its round that count."""
        options = self.options
        replicas = options.policy.open
        within = batch.first // options.batch_records // replicas * replicas
        first = batch.epoch * options.batches + within
        last = min(first + replicas, (batch.epoch + 1) * options.batches)
        return [b for b in self.batches[first:last] if b not in self.skipped]

    def updates(self, part: NDArray, velocity: NDArray | None) -> NDArray:
        """``[rows]``: how often each record is in a shard's parameters and slots."""
        sums = part[: self.rows]
        if velocity is not None:
            sums = (1 - MOMENTUM) * sums + MOMENTUM * velocity[: self.rows]
        return sums

    def expected(self, applied: Sequence[Mapping[str, Any]]) -> NDArray:
        """``[rows]``: the same by the applied-set."""
        found = np.zeros(self.rows, np.float32)
        for epoch in applied:
            first = epoch["epoch"] * self.options.records
            for start, stop in epoch["applied"]:
                found[first + start : first + stop] = 1
        for batch in self.skipped:
            found[self.entries(batch)] = 0
        return found

    def totals(self, epoch: int, trained: NDArray) -> tuple[float, float, float]:
        """Those of an epoch of which the records in ``trained`` count: their number, which is the
        sum of their losses, and the sum of their positions."""
        records = self.options.records
        positions = np.flatnonzero(trained[epoch * records : (epoch + 1) * records])
        return float(len(positions)), float(len(positions)), float(positions.sum())

    def whole(self) -> NDArray:
        """``[rows]``: the same at the end of the job."""
        whole = np.zeros(self.rows, np.float32)
        whole[: self.options.records * self.options.epochs] = 1
        for batch in self.skipped:
            whole[self.entries(batch)] = 0
        return whole

    def torn(self, part: NDArray) -> bool:
        """Whether the pair of a shard does not sum to zero."""
        return bool((part[self.rows : self.rows + UNIT] + part[self.rows + UNIT :]).any())

    def loss(self, parameters: NDArray, places: Places) -> float:
        """The result of an evaluation: the sum of all witnesses."""
        parts = (places.part(parameters, shard) for shard in places.dense)
        return float(sum(part[: self.rows].sum() for part in parts))

    def final(self) -> tuple[NDArray, NDArray | None, list[Tables]]:
        """Sync: shard 0's parameters and velocity at the end, and all shards' tables, by the update
        engine alone."""
        options = self.options
        plan = witness_plan(1, options.records * options.epochs)
        engine = NumpyEngine(optimizer(options.momentum), plan, 0)
        engine.load({ARENA: np.zeros(plan.arenas[0].length, np.float32)})
        parameters = np.zeros(plan.arenas[0].length, np.float32)
        tables = [Tables(self.plan, shard) for shard in range(options.shards)]
        version = 0
        for epoch in range(options.epochs):
            for first in range(0, options.batches, options.policy.open):
                version += 1
                members = self._round_of(self.batches[epoch * options.batches + first])
                if not members:
                    continue
                total = sum(batch.count for batch in members)
                parts = []
                rows: list[list[Part]] = [[] for _ in tables]
                for batch in members:
                    gradient = self.gradient(batch, parameters)
                    assert gradient is not None
                    weight = np.float32(batch.count / total)
                    parts.append(Part(weight, {ARENA: gradient}))
                    for shard, mine in enumerate(rows):
                        mine.append(Part(weight, {}, self._rows(batch, gradient, shard)))
                updates = engine.slots().iterations
                for own, mine in zip(tables, rows, strict=True):
                    own.apply(mean_rows(tuple(mine)), 1.0, updates, version)
                engine.apply(weighted_mean(tuple(parts)))
                parameters[:] = engine.snapshot()[ARENA]
        slots = engine.slots().elements
        velocity = slots["momentums"][ARENA] if options.momentum else None
        return engine.snapshot()[ARENA], velocity, tables

    def _rows(self, batch: BatchId, gradient: NDArray, shard: int) -> dict[int, Rows]:
        values = self.row_gradients(batch, gradient, shard)
        wanted = self.tables.wanted(batch, shard)
        return {table: Rows(ids, v) for (table, ids), v in zip(wanted, values, strict=True)}
