"""A shard without rounds: every gradient is applied as it comes, unless it is too old."""

from __future__ import annotations

from pserver.core.counters import Counters
from pserver.core.requests import PushRequest, PushResult, Values
from pserver.engine.parameters import Parameters
from pserver.engine.pulled import Pulled
from pserver.transport.arrival import Arrived
from psrpc.core.policy import Policy
from psrpc.ops.clock import Clock


class Pushes:
    """One push is one update. Not thread-safe: the shard's engine holds its lock."""

    def __init__(self, held: Parameters, counters: Counters, policy: Policy, clock: Clock) -> None:
        self._held = held
        self._counters = counters
        self._clock = clock
        self._pulled = Pulled()
        self._policy = policy

    def begin(self, policy: Policy) -> None:
        """A generation under ``policy``: nobody computes from anything in it."""
        self._policy = policy
        self._pulled.clear()

    def apply(self, request: PushRequest, arrived: Arrived | None, pulls: bool) -> PushResult:
        """Applies a gradient that is not too old, or records that it was not finite.

        Args:
            pulls: its worker pulls the newest parameters with it.

        Raises:
            InvalidArgument, ResourceExhausted: see :meth:`pserver.tables.tables.Tables.check`.
                Nothing was changed.
        """
        held, counters = self._held, self._counters
        if arrived is None:
            # At any age: it says that the batch has no gradient, and shards must not disagree.
            held.applied.add(request.batch, skipped=True)
            counters.skipped += 1
            return PushResult("skipped", held.version, skipped=True)
        staleness = held.version - request.base_version
        most = self._policy.max_staleness
        if most is not None and staleness > most:
            counters.too_stale += 1
            return PushResult("too_stale", held.version, staleness)
        if arrived.rows:
            held.tables.check(arrived.rows)
        began = self._clock.now()
        if self._policy.delay_compensation is None:
            held.update(arrived.arrays, staleness, arrived.rows)
        else:
            self._compensate(request, arrived, staleness, pulls)
        took_s = self._clock.now() - began
        counters.apply_s += took_s
        held.applied.add(request.batch, totals=request.totals)
        counters.count_applied(request.worker, staleness)
        return PushResult("applied", held.version, staleness, int(took_s * 1e6))

    def _compensate(
        self, request: PushRequest, arrived: Arrived, staleness: int, pulls: bool
    ) -> None:
        pulled = self._pulled.of(request.base_version) if staleness else None
        if staleness and pulled is None:
            self._counters.uncompensated += 1
        gradients = self._held.compensated(arrived.arrays, pulled)
        del pulled
        if pulls:
            # What it has is replaced in any case, and whatever is held is copied by the update.
            self._pulled.forget(request.worker)
        self._held.update(gradients, staleness, arrived.rows)

    def pulled(self, worker: str, values: Values) -> None:
        """``worker`` computes from ``values`` from now on."""
        if self._policy.delay_compensation is not None:
            plain = values if values.encoding == "plain" else self._held.values()
            self._pulled.remember(worker, plain)

    def forget(self, worker: str) -> None:
        """``worker`` is gone."""
        self._pulled.forget(worker)
