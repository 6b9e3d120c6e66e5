"""Adds up gradients for one push: of batches computed at once (async), or of a round (sync)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pserver.client.requests import GradientPush, SummedBatch
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.encoding import Encoded, Encoding, Gradient, round_to, wire_dtype
from psrpc.core.plan import ArenaPlan, Plan
from psrpc.core.tables import MAX_IDS, Rows, weighted_sum
from psrpc.wire.commands import from_batch
from worker.data.source import Array
from worker.embedding.row_sets import ReceivedRows
from worker.protocol import actions as does
from worker.step.gradient_source import GradientResult

BLOCK = 1 << 16
"""Elements that are added at a time, so that what is between stays in the cache."""


def sum_pushes(
    add: Callable[[Sequence[GradientResult]], Sequence[Gradient]],
    action: does.PushPull,
    pushes: Sequence[GradientPush],
    results: Mapping[BatchId, tuple[GradientResult, tuple[float, ...]]],
) -> list[GradientPush] | None:
    """Async: returns ``pushes`` with the gradients of all ``summed`` attempts added; None if a sum
    is not finite. ``results`` have the totals of each; for ``add`` see
    :class:`worker.step.gradient_source.GradientSource`."""
    attempts = summed_attempts(action)
    sums = add([results[batch][0] for batch in (action.batch, *[one.batch for one in attempts])])
    if not sums:
        return None
    totals = [results[one.batch][1] for one in attempts]
    return [
        replace(push, gradients=total, summed=_beside(action, attempts, shard, totals))
        for shard, (push, total) in enumerate(zip(pushes, sums, strict=True))
    ]


def summed_attempts(action: does.PushPull | does.Push | does.PushNext) -> list[Attempt]:
    """Returns the further attempts of a sum."""
    return [Attempt(from_batch(one.batch), one.attempt) for one in action.summed]


def _beside(
    action: does.PushPull | does.Push | does.PushNext,
    attempts: Sequence[Attempt],
    shard: int,
    totals: Sequence[tuple[float, ...]],
) -> tuple[SummedBatch, ...]:
    grants = [one.grant for one in action.summed]
    # Shard 0 keeps the totals of the epoch.
    kept = [() for _ in totals] if shard else totals
    return tuple(map(SummedBatch, attempts, kept, grants))


class RoundSum:
    """Adds up a worker's gradients of one round in float32, each times its number of records. Not
    thread-safe.

    The sum is in memory of its own, which the next round uses again: gradients are only valid until
    the worker receives other parameters, and row gradients until it computes the next.

    Attributes:
        used: the table rows that the last gradient was computed from.
    """

    def __init__(self) -> None:
        self.used: ReceivedRows | None = None
        self._totals: dict[BatchId, tuple[float, ...]] = {}
        """By summed batch, what it adds to the totals of its epoch."""
        self._memory: dict[tuple[int, str], list[Array]] = {}
        """By shard and arena, arrays as long as the parts of a gradient."""
        self._encodings: dict[tuple[int, str], Encoding] = {}
        self._rows: dict[int, dict[int, Rows]] = {}

    def __contains__(self, batch: BatchId) -> bool:
        """Whether the gradient of ``batch`` is in the sum."""
        return batch in self._totals

    def clear(self) -> None:
        """Begins another sum."""
        self._totals.clear()
        self._rows.clear()

    def add(
        self,
        plan: Plan,
        batch: BatchId,
        result: GradientResult,
        totals: tuple[float, ...],
        used: ReceivedRows | None,
    ) -> None:
        """Adds the finite, uncompressed gradient of ``batch``, in any order of batches: arenas of
        integers get the values of the highest. For ``totals`` see
        :class:`pserver.client.requests.GradientPush`."""
        first, highest = not self._totals, batch > max(self._totals, default=batch)
        for shard, gradient in enumerate(result.gradients):
            for arena in plan.arenas:
                into = self._parts(shard, arena, gradient[arena.name])
                dtype = wire_dtype(gradient[arena.name].encoding, arena.dtype)
                for total, part in zip(into, gradient[arena.name].parts, strict=True):
                    if not arena.replaced:
                        _add(total, part.view(dtype), batch.count, first)
                    elif first or highest:
                        np.copyto(total, part)
        for shard, tables in enumerate(result.rows):
            held = self._rows.setdefault(shard, {})
            for table, rows in tables.items():
                before = [(np.float32(1), held[table])] if table in held else []
                held[table] = weighted_sum([*before, (np.float32(batch.count), rows)])
        self._totals[batch], self.used = totals, used

    def _parts(self, shard: int, arena: ArenaPlan, encoded: Encoded) -> list[Array]:
        key, sizes = (shard, arena.name), [part.size for part in encoded.parts]
        known = self._memory.get(key, [])
        if [part.size for part in known] != sizes:
            dtype = arena.dtype if encoded.encoding == "plain" else "float32"
            known = self._memory[key] = [np.empty(size, dtype) for size in sizes]
        self._encodings[key] = encoded.encoding
        return known

    def pushes(
        self, plan: Plan, action: does.Push | does.PushNext, bases: Sequence[int]
    ) -> list[GradientPush] | None:
        """Returns each shard's part of the mean, for a push under all batches of the sum. None if
        an element is infinite, or if there are more rows than a message holds. :meth:`clear` must
        follow before the next :meth:`add`."""
        attempts = summed_attempts(action)
        summed = {action.batch, *[one.batch for one in attempts]}
        assert summed == self._totals.keys(), "a sum is of all its attempts"
        totals = [self._totals[one.batch] for one in attempts]
        records = sum(batch.count for batch in summed)
        made = []
        for shard, base in enumerate(bases):
            gradient, rows = self._mean(plan, shard, records), self._mean_rows(shard, records)
            if gradient is None or rows is None:
                return None
            own = () if shard else self._totals[action.batch]
            beside = _beside(action, attempts, shard, totals)
            push = action.batch, action.attempt, base, gradient, rows, own, action.grant, beside
            made.append(GradientPush(*push))
        return made

    def _mean(self, plan: Plan, shard: int, records: int) -> Gradient | None:
        mean = {}
        for arena in plan.arenas:
            parts, encoding = self._memory[shard, arena.name], self._encodings[shard, arena.name]
            # Each is divided, whatever the others are.
            finite = [arena.replaced or _divide(part, records) for part in parts]
            if not all(finite):
                return None
            if encoding != "plain":
                parts = [round_to(part, encoding) for part in parts]
            mean[arena.name] = Encoded(encoding, tuple(parts))
        return mean

    def _mean_rows(self, shard: int, records: int) -> dict[int, Rows] | None:
        rows = self._rows.get(shard, {})
        if sum(len(each.ids) for each in rows.values()) > MAX_IDS:
            return None
        finite = [_divide(each.values.reshape(-1), records) for each in rows.values()]
        return rows if all(finite) else None


def _add(total: Array, part: Array, records: int, first: bool) -> None:
    """Adds ``part`` times ``records`` to ``total``, or begins with it."""
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(total), BLOCK):
            into, one = total[start : start + BLOCK], part[start : start + BLOCK]
            one = one.astype(total.dtype, copy=False) * total.dtype.type(records)
            if first:
                into[:] = one
            else:
                into += one


def _divide(total: Array, records: int) -> bool:
    """Divides in place; returns whether all elements are finite."""
    finite = True
    for start in range(0, len(total), BLOCK):
        into = total[start : start + BLOCK]
        into *= into.dtype.type(1 / records)
        finite = finite and bool(np.isfinite(into).all())
    return finite
