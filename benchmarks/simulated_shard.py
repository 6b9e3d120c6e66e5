"""A shard in this process, and how a worker of this process talks to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pserver.core.assembly import Extent
from pserver.core.fence import Fence, ShardIdentity
from pserver.core.requests import InitializeRequest, PullRequest, PushRequest, Snapshot, Values
from pserver.engine.engine import ShardEngine
from pserver.transport.shard_memory import Shared
from pserver.updates.factory import make_engine
from psrpc.core.commands import Attempt, Begin, Decision, SnapshotOrder
from psrpc.core.encoding import Gradient
from psrpc.core.plan import Plan, aligned_empty
from psrpc.core.policy import Policy
from worker.data.source import Array

TIMEOUT_S = 60.0
_INCARNATION = 1


@dataclass(frozen=True)
class Recipe:
    """The large-batch recipe: see ``Begin.rate_scale`` and docs/design/0009-consistency.md."""

    rate_scale: float = 1.0
    warmup_updates: int = 0


class Shard:
    """The one shard that holds all parameters, and how a worker talks to it."""

    def __init__(
        self,
        plan: Plan,
        optimizer: Mapping[str, object],
        initial: Mapping[str, Array],
        policy: Policy,
        recipe: Recipe,
    ) -> None:
        """Args:
        optimizer: as the job's description has it.
        initial: what the parameters are at first: arena name -> ``[length]``.
        """
        self._plan = plan
        updates = make_engine("numpy", optimizer, plan, 0)
        self._engine = ShardEngine(ShardIdentity(0, _INCARNATION, 0, 0), plan, updates, _NoSink())
        self._fence = Fence(1, 1, plan.hash, _INCARNATION)
        # Where a worker leaves its gradient: as in a segment that it shares with the shard.
        self._outbox = [aligned_empty(arena.length, arena.dtype) for arena in plan.arenas]
        self._extents = tuple(
            Extent(index, array.nbytes, "plain") for index, array in enumerate(self._outbox)
        )
        self._views = [array.view(np.uint8) for array in self._outbox]
        self._engine.commands.begin(
            Begin(
                1,
                1,
                settings=policy,
                rate_scale=recipe.rate_scale,
                warmup_updates=recipe.warmup_updates,
            )
        )
        # Copies, since what comes becomes the parameters.
        values = [_copy(initial[arena.name]).view(np.uint8) for arena in plan.arenas]
        self._engine.initialize(
            InitializeRequest(self._fence, self._extents), Shared(values), TIMEOUT_S
        )

    def pull(self, worker: str) -> Values:
        """The newest parameters."""
        return self._engine.pull(PullRequest(self._fence, worker, None), TIMEOUT_S)

    def push_pull(
        self, worker: str, attempt: Attempt, base: int, gradient: Gradient
    ) -> tuple[str, int, Values]:
        """The outcome of a push, its staleness, and the newest parameters."""
        request, arrival = self._request(worker, attempt, base, gradient)
        result, values = self._engine.push_pull(request, arrival, TIMEOUT_S, "plain")
        return result.outcome, result.staleness, values

    def stage(self, worker: str, attempt: Attempt, base: int, gradient: Gradient) -> None:
        """Leaves a micro-batch of the open round."""
        request, arrival = self._request(worker, attempt, base, gradient)
        self._engine.push(request, arrival, TIMEOUT_S)

    def decide(self, number: int, attempts: Sequence[Attempt]) -> None:
        """Applies a round."""
        self._engine.commands.decide(Decision(1, number, tuple(attempts)))

    def _request(
        self, worker: str, attempt: Attempt, base: int, gradient: Gradient
    ) -> tuple[PushRequest, Shared]:
        if gradient:
            parts = [gradient[arena.name].parts for arena in self._plan.arenas]
            for into, found in zip(self._outbox, parts, strict=True):
                np.concatenate([part.reshape(-1) for part in found], out=into)
        request = PushRequest(
            fence=self._fence,
            worker=worker,
            attempt=attempt,
            base_version=base,
            examples=attempt.batch.count,
            skipped=not gradient,
            extents=self._extents if gradient else (),
        )
        return request, Shared(self._views if gradient else [])


def _copy(array: Array) -> Array:
    copy = aligned_empty(len(array), array.dtype.name)
    np.copyto(copy, array)
    return copy


class _NoSink:
    """No snapshot is ever ordered."""

    def begun(self, generation: int) -> None: ...

    def taken(self, order: SnapshotOrder, snapshot: Snapshot) -> None: ...

    def failed(self, order: SnapshotOrder, version: int, reason: str) -> None: ...

    def repeated(self, order: SnapshotOrder) -> None: ...
