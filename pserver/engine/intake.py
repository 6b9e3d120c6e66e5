"""Checks incoming tensors by their header and assembles them without the shard's lock.

So pushes arrive in parallel, and only their effects are serialized."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from pserver.core.assembly import GRADIENTS, PLAIN, check_extents
from pserver.core.requests import InitializeRequest, PushRequest
from pserver.core.table_ids import check_row_extents
from pserver.engine.gate import Gate
from pserver.engine.parameters import Parameters
from pserver.transport.arrival import Arrival, Arrived, arriving
from pserver.transport.buffers import BufferPool, pool_size
from psrpc.core.batch import LOSS, MAX_VALUES
from psrpc.core.errors import InvalidArgument
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy


def buffers_for(plan: Plan, shard: int, policy: Policy) -> int:
    """Number of pushes of ``plan`` that a shard holds at once under ``policy``."""
    return pool_size(plan.shard_nbytes(shard), policy.open)


class Intake:
    """Receives into the buffers of ``pool``. Thread-safe.

    The state checked here may change before the caller takes the lock, so the caller asks the gate
    again. Within a generation the version only rises."""

    def __init__(self, plan: Plan, gate: Gate, held: Parameters, pool: BufferPool) -> None:
        self.pool = pool
        self._plan = plan
        self._shard = gate.identity.shard
        self._gate = gate
        self._held = held

    def follow(self, policy: Policy) -> None:
        """Resizes the pool for ``policy``."""
        self.pool.resize(buffers_for(self._plan, self._shard, policy))

    @contextmanager
    def values(
        self, request: InitializeRequest, arrival: Arrival, timeout_s: float
    ) -> Iterator[Arrived]:
        """Yields the first values. Raises as :func:`arriving`, and InvalidArgument if they do not
        match the plan."""
        check = partial(self._gate.admit, request.fence)
        check()
        check_extents(self._plan, self._shard, request.extents, PLAIN)
        with arriving(
            arrival, self._plan, request.extents, self.pool, timeout_s, check, staged=False
        ) as arrived:
            yield arrived

    @contextmanager
    def gradient(
        self, request: PushRequest, arrival: Arrival, timeout_s: float
    ) -> Iterator[Arrived | None]:
        """Yields the gradient of a push; None if it is skipped, and then nothing may arrive.
        Refuses before allocating anything. Raises as :func:`arriving` and :func:`check_push`, and
        NotReady if there are no parameters."""
        check = partial(self._gate.admit_worker, request)
        check()
        self._gate.need_values()
        check_push(request, self._plan, self._shard, self._held.version)
        if request.rows:
            self._held.tables.check_ids(request.rows)
        staged = self._gate.identity.settings.rounds
        with arriving(
            arrival,
            self._plan,
            request.extents,
            self.pool,
            timeout_s,
            check,
            staged=staged,
            rows=request.rows,
            worker=request.worker,
            of=f"the push of {request.batch} by {request.worker or 'a worker'}",
        ) as arrived:
            yield None if request.skipped else arrived

    def become_parameters(self, arrived: Arrived) -> None:
        """Leaves the memory of the arrived values to the parameters: the pool does not lend it
        again. The caller holds the lock."""
        if arrived.loan is not None:
            arrived.loan.keep = True
            self.pool.forget()


def check_push(request: PushRequest, plan: Plan, shard: int, version: int) -> None:
    """Refuses a push that cannot be applied to ``shard`` at ``version``, before anything is
    allocated.

    Raises:
        InvalidArgument: wrong counts, a base version from the future, or extents that do not match
            the plan.
    """
    if request.examples != request.batch.count:
        raise InvalidArgument(
            f"a push of {request.batch} says it has {request.examples} examples;"
            f" expected {request.batch.count}"
        )
    if request.base_version > version:
        raise InvalidArgument(
            f"a push of {request.batch} has base version {request.base_version};"
            f" shard {shard} is at {version}"
        )
    if request.totals and not (
        LOSS <= len(request.totals) <= MAX_VALUES and all(map(math.isfinite, request.totals))
    ):
        raise InvalidArgument(
            f"a push of {request.batch} has {len(request.totals)} totals; expected none, or"
            f" {LOSS} to {MAX_VALUES} finite numbers"
        )
    if request.skipped:
        if request.extents or request.rows:
            raise InvalidArgument(
                f"a skipped push of {request.batch} announces {len(request.extents)} arenas;"
                " expected none"
            )
        if request.totals:
            raise InvalidArgument(f"a skipped push of {request.batch} has totals; expected none")
        return
    extents = request.extents
    if request.rows:
        cut = max(0, len(extents) - len(request.rows))
        check_row_extents(plan, extents[cut:], request.rows)
        extents = extents[:cut]
    check_extents(plan, shard, extents, GRADIENTS)
