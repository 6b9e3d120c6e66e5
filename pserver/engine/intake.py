"""Checks incoming tensors by their header and assembles them without the shard's lock, so that
pushes arrive in parallel and only their effects are serialized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from pserver.core.assembly import (
    PLAIN,
    VALUES,
    Extent,
    check_extents,
    check_finite,
    is_finite,
)
from pserver.core.requests import InitializeRequest, PushRequest
from pserver.core.table_ids import TableIds
from pserver.engine.buffers import Arrived, BufferPool, pool_size
from pserver.engine.gate import Gate
from pserver.engine.parameters import Parameters
from pserver.engine.push_checks import check_push, check_sum
from pserver.transport.transport import Arrival, NDArray
from psrpc.core.encoding import decode, wire_dtype
from psrpc.core.plan import Plan, aligned_empty
from psrpc.core.policy import Policy
from psrpc.core.tables import Ids, Rows


def buffers_for(plan: Plan, shard: int, policy: Policy) -> int:
    """Number of pushes of ``plan`` that a shard holds at once under ``policy``."""
    return pool_size(plan.shard_nbytes(shard), policy.open)


class Intake:
    """Receives tensors into the buffers of ``pool``. Thread-safe.

    The state checked here may change before the caller takes the lock, so the caller has to ask the
    gate again. The check of the base version remains valid, because the version only rises within a
    generation.
    """

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
        """Yields the initial values. Raises the errors of :func:`arriving`, and InvalidArgument if
        the values do not match the plan."""
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
        """Yields the gradient of a push; None if the push is marked as skipped, in which case no
        tensor may follow.

        Refuses a wrong header before allocating anything. Raises the errors of :func:`arriving` and
        :func:`check_push`, and NotReady if there are no parameters.
        """
        check = partial(self._gate.admit_worker, request)
        # Read first: if a generation begins meanwhile, the check raises StaleGeneration.
        settings = self._gate.identity.settings
        check()
        self._gate.need_values()
        check_push(request, self._plan, self._shard, self._held.version)
        if request.rows:
            self._held.tables.check_ids(request.rows)
        if request.summed:
            check_sum(request, settings)
        staged = settings.rounds
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
        """Gives the memory of the arrived values to the parameters: the pool does not lend it
        again. The caller holds the lock."""
        if arrived.loan is not None:
            arrived.loan.keep = True
            self.pool.forget()


@contextmanager
def arriving(
    arrival: Arrival,
    plan: Plan,
    extents: Sequence[Extent],
    pool: BufferPool,
    timeout_s: float,
    check: Callable[[], object],
    *,
    staged: bool,
    rows: TableIds = (),
    worker: str = "",
    of: str = "",
) -> Iterator[Arrived]:
    """Yields the tensors of a push after receiving all of them.

    Args:
        extents: checked by :func:`pserver.core.assembly.check_extents`; those of ``rows`` come
            last.
        timeout_s: how long to wait for a buffer.
        check: raises when waiting has become pointless.
        staged: the gradient may be kept after the block and added to others, so it is copied into
            the shard's own buffers, in the arenas' own dtypes.
        rows: the ids that have row gradients. Their arrays are allocated separately from the pool,
            but only while holding a loan from it, which bounds how many exist.
        worker: the pushing worker; see :func:`pserver.engine.buffers.worker_quota`.
        of: names the gradient in errors; all its elements have to be finite. Empty for values,
            which are not checked.

    Raises:
        InvalidArgument: the received bytes are not those announced.
        NotReady: all buffers, or those of ``worker``, were in use for ``timeout_s``.
        Stalled: the tensors stopped coming.
    """
    if not extents:
        arrival.receive(plan, extents, {})
        yield Arrived({}, None)
        return
    arenas = extents[: len(extents) - len(rows)] if rows else extents
    if not staged and all(e.encoding in VALUES for e in arenas):
        placed = arrival.in_place(plan, extents, len(rows))
        if placed is not None:
            arrays = {name: _typed(plan, e, placed[0]) for name, e in _named(plan, arenas)}
            yield Arrived(arrays, None, _placed_rows(plan, rows, placed[1]))
            return
    with pool.loan(timeout_s, check, worker) as loan:
        own = loan.buffers.arrays
        into: dict[str, NDArray] = {}
        encoded: list[tuple[str, Extent]] = []
        for name, extent in _named(plan, arenas):
            if extent.encoding in ("int8", "topk") or (staged and extent.encoding != "plain"):
                encoded.append((name, extent))
                into[name] = loan.buffers.raw(name, extent.nbytes)
            else:
                into[name] = (
                    own[name]
                    .view(np.uint8)[: extent.nbytes]
                    .view(wire_dtype(extent.encoding, own[name].dtype))
                )
        own_rows = _receive(plan, extents, arrival, into, rows, of)
        for name, extent in encoded:
            if extent.encoding in VALUES:
                np.copyto(own[name], _typed(plan, extent, into))
                if of:
                    check_finite(f"arena {name} of {of}", own[name])
            else:
                decode(extent.encoding, into[name], own[name])
            into[name] = own[name]
        yield Arrived(into, loan, own_rows)


def _receive(
    plan: Plan,
    extents: Sequence[Extent],
    arrival: Arrival,
    into: Mapping[str, NDArray],
    rows: TableIds,
    of: str,
) -> dict[int, Rows]:
    """Receives all tensors and checks the arenas of a gradient; returns the gradients of
    ``rows``."""
    if not of and not rows:
        arrival.receive(plan, extents, into)
        return {}
    values = {table: _row_buffer(plan, table, ids) for table, ids in rows}
    unknown = {table: array.size for table, array in values.items()}

    def look(extent: int, part: NDArray) -> None:
        table = extent - len(plan.arenas)
        if table < 0:
            if of:
                check_finite(f"arena {plan.arenas[extent].name} of {of}", part)
        elif is_finite(part):
            unknown[table] -= part.size

    arrival.receive(plan, extents, into, values, look)
    return {table: Rows(ids, values[table], not unknown[table]) for table, ids in rows}


def _named(plan: Plan, extents: Sequence[Extent]) -> Iterator[tuple[str, Extent]]:
    return ((plan.arenas[extent.arena].name, extent) for extent in extents)


def _typed(plan: Plan, extent: Extent, raw: Mapping[str, NDArray]) -> NDArray:
    arena = plan.arenas[extent.arena]
    return raw[arena.name].view(wire_dtype(extent.encoding, arena.dtype))


def _placed_rows(plan: Plan, rows: TableIds, views: Sequence[NDArray]) -> dict[int, Rows]:
    return {
        table: Rows(ids, view.view(np.float32).reshape(len(ids), plan.tables[table].width))
        for (table, ids), view in zip(rows, views, strict=True)
    }


def _row_buffer(plan: Plan, table: int, ids: Ids) -> npt.NDArray[np.float32]:
    width = plan.tables[table].width
    return aligned_empty(len(ids) * width, "float32").reshape(len(ids), width)
