"""A shard's engine without a server: what it is sent, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np

from pserver.core.applied import AppliedSet
from pserver.core.assembly import shard_extents
from pserver.core.fence import Fence
from pserver.core.requests import (
    InitializeRequest,
    PullRequest,
    PushRequest,
    PushResult,
    RestoredState,
)
from pserver.engine.engine import ShardEngine
from pserver.transport.shard_memory import Shared
from pserver.updates.engine import Slots
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision
from psrpc.core.plan import aligned_empty
from psrpc.core.policy import Policy
from tests.pserver.shards import (
    INCARNATION,
    NDArray,
    engine_of,
    plan_of,
)

PLAN = plan_of(size=8, state=False)
ARENA = PLAN.arenas[0].name
A, B, C, D, E = (BatchId(0, 10 * n, 10) for n in range(5))
WAIT_S = 30.0

BACKUPS = Policy(mode="sync", replicas=3, aggregate=2)
ROUNDS = Policy(mode="sync", replicas=2)


def fence(generation: int = 1, policy: int = 1) -> Fence:
    return Fence(generation, policy, PLAN.hash, INCARNATION)


def filled(value: float) -> NDArray:
    array = aligned_empty(PLAN.arenas[0].length, "float32")
    array.fill(value)
    return array


def here(value: float) -> Shared:
    """Tensors that have arrived, all elements ``value``."""
    return Shared([filled(value).view(np.uint8)])


def initialized(engine: ShardEngine, generation: int = 1) -> ShardEngine:
    """The same engine, with values of 0."""
    request = InitializeRequest(fence(generation), tuple(shard_extents(PLAN, 0)))
    engine.initialize(request, here(0), WAIT_S)
    return engine


def a_push(
    batch: BatchId = A,
    attempt: int = 1,
    *,
    base: int = 0,
    worker: str = "w",
    skipped: bool = False,
    generation: int = 1,
    policy: int = 1,
) -> PushRequest:
    extents = () if skipped else tuple(shard_extents(PLAN, 0))
    found = fence(generation, policy)
    return PushRequest(found, worker, Attempt(batch, attempt), base, batch.count, skipped, extents)


def decision(*attempts: tuple[BatchId, int], number: int = 0, generation: int = 1) -> Decision:
    return Decision(generation, number, tuple(Attempt(b, n) for b, n in attempts))


def values(engine: ShardEngine, generation: int) -> list[float]:
    pulled = engine.pull(PullRequest(fence(generation), "w", None), 0)
    assert pulled.generation == generation
    return list(pulled.arrays[ARENA][:1])


def checkpoint(value: float, version: int, *batches: BatchId) -> RestoredState:
    applied = AppliedSet()
    for batch in batches:
        applied.add(batch)
    slots = Slots(scalars={"iterations": np.array(version)})
    return RestoredState({ARENA: filled(value)}, slots, applied, version)


def shard_of(policy: Policy, **options: Any) -> ShardEngine:
    """A shard with values of 0."""
    return initialized(engine_of(PLAN, policy=policy, **options))


def push(
    engine: ShardEngine, batch: BatchId, base: int = 0, value: float = 1.0, **options: Any
) -> PushResult:
    return engine.push(a_push(batch, base=base, **options), here(value), 0)


def value(engine: ShardEngine, generation: int = 1, policy: int = 1) -> float:
    request = PullRequest(fence(generation, policy), "reader", None)
    (found,) = set(engine.pull(request, 0).arrays[ARENA])
    return float(found)
