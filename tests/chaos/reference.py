"""What a synchronous job must come to, from the update engine alone: no process, no network."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pserver.staging import Part, weighted_mean
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.checkpoint import ShardState
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
        return _run(self._options)


@lru_cache(maxsize=8)
def _run(options: Options) -> list[ShardState]:
    plan = options.plan
    engines = []
    for shard in range(options.shards):
        engine = NumpyEngine(optimizer_config(options.optimizer), plan, shard)
        cuts = {a.name: slice(a.cuts[shard], a.cuts[shard + 1]) for a in plan.arenas}
        engine.load({name: v[cuts[name]].copy() for name, v in initial_values(options).items()})
        engines.append(engine)
    for round_number in range(options.total_steps):
        first = round_number * options.policy.taken
        for shard, engine in enumerate(engines):
            values = engine.snapshot()[WITNESS]
            found = [
                gradient(options, batch, shard, values)
                for batch in range(first, first + options.policy.taken)
            ]
            finite = [one for one in found if one is not None]
            if finite:
                weight = np.float32(1 / len(finite))
                engine.apply(weighted_mean(tuple(Part(weight, one) for one in finite)))
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
    return states
