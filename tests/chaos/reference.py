"""The result of a synchronous job, from the update engine alone: no process, no network."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pserver.core.staging import Part, mean_rows, weighted_mean
from pserver.tables.tables import Tables
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.checkpoint.checkpoint import ShardState
from tests.chaos.row_witness import row_gradients
from tests.chaos.witness import (
    WITNESS,
    Options,
    gradient,
    initial_values,
    optimizer_config,
)


class Reference:
    """One job without faults."""

    def __init__(self, options: Options) -> None:
        assert options.fixed
        self._options = options

    def run(self) -> list[ShardState]:
        """The final state of every shard; the applied-sets are left out."""
        return _run(self._options)[0]

    def tables(self) -> list[Tables]:
        """The final rows of every shard."""
        return _run(self._options)[1]


@lru_cache(maxsize=8)
def _run(options: Options) -> tuple[list[ShardState], list[Tables]]:
    plan = options.plan
    tables = [Tables(plan, shard) for shard in range(options.shards)]
    updates = 0
    engines = []
    for shard in range(options.shards):
        place = options.slices + shard
        engine = NumpyEngine(optimizer_config(options.optimizer), plan, place)
        cuts = {a.name: slice(a.cuts[place], a.cuts[place + 1]) for a in plan.arenas}
        engine.load({name: v[cuts[name]].copy() for name, v in initial_values(options).items()})
        engines.append(engine)
    for round_number in range(options.total_steps):
        first = round_number * options.policy.taken
        batches = [n for n in range(first, first + options.policy.taken) if n != options.poisoned]
        if not batches:
            continue
        weight = np.float32(1 / len(batches))
        for shard, engine in enumerate(engines):
            values = engine.snapshot()[WITNESS]
            parts = []
            for batch in batches:
                found = gradient(options, batch, shard, values)
                assert found is not None
                rows = row_gradients(options, batch, shard) if options.rows else {}
                parts.append(Part(weight, found, rows))
            # Before the gradients become their own sum.
            tables[shard].apply(mean_rows(tuple(parts)), 1.0, updates, updates + 1)
            engine.apply(weighted_mean(tuple(parts)))
        updates += 1
    states = []
    for engine in engines:
        slots = engine.slots()
        states.append(
            ShardState(
                values=engine.snapshot(),
                elements=slots.elements,
                variables={},
                scalars=slots.scalars,
                version=options.total_steps,
                applied=(),
            )
        )
    return states, tables
