"""Keeps the gradients of an open round until the coordinator decides which of them it applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.errors import InvalidArgument, ResourceExhausted
from psrpc.core.plan import INTEGERS
from psrpc.core.tables import Rows, weighted_sum

NDArray = npt.NDArray[Any]

MAX_ATTEMPTS = 2
"""Maximum number of attempts held per micro-batch."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The contents of an attempt: its gradient by arena (None if that was not finite) and its row
    gradients by table.

    ``worker`` computed it from parameters of version ``base``. ``release`` returns the memory of
    the gradient to its pool.

    ``summed`` are the attempts of the sum that it is part of, the one that holds the sum first:
    that has the ``examples`` of all, the others have none, and an empty gradient."""

    examples: int
    gradients: Mapping[str, NDArray] | None
    release: Callable[[], None] = field(default=lambda: None, compare=False)
    worker: str = ""
    base: int = 0
    rows: Mapping[int, Rows] = field(default_factory=dict, compare=False)
    totals: tuple[float, ...] = ()
    summed: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One summand of a round's mean."""

    weight: np.float32
    gradients: Mapping[str, NDArray]
    rows: Mapping[int, Rows] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Ready:
    """The round can be applied.

    Attributes:
        parts: the summands in batch-id order; empty if all attempts were skipped.
        skipped: the batches without a gradient.
        staged: the named attempts in batch-id order.
    """

    parts: tuple[Part, ...]
    skipped: frozenset[BatchId]
    staged: tuple[Staged, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Missing:
    """The round cannot be applied: these named attempts are not staged, or in a sum with others
    that are not named."""

    attempts: tuple[Attempt, ...]


class Staging:
    """The attempts staged for the open round or a later one. Not thread-safe.

    K micro-batches are open at once with at most :data:`MAX_ATTEMPTS` attempts each, so at most 2 K
    gradients are held."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._held: dict[BatchId, dict[int, Staged]] = {}
        self._everywhere: set[Attempt] = set()
        """The staged attempts that all shards are known to hold."""

    def __len__(self) -> int:
        """Number of staged attempts. Any thread may call it: list() copies in one atomic step."""
        return sum(len(attempts) for attempts in list(self._held.values()))

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches with at least one staged attempt."""
        return len(self._held)

    def holds(self, attempt: Attempt) -> bool:
        """Whether ``attempt`` is staged, by itself or in a sum."""
        return attempt.number in self._held.get(attempt.batch, {})

    def admit(self, *attempts: Attempt) -> None:
        """Checks that new ``attempts``, one or all of a sum, can be staged.

        Raises:
            InvalidArgument: a batch overlaps a staged one.
            ResourceExhausted: no room for one more attempt or micro-batch.
        """
        micros = len(self._held)
        for attempt in attempts:
            self._admit(attempt, micros)
            micros += attempt.batch not in self._held

    def _admit(self, attempt: Attempt, micros: int) -> None:
        """Admits one, where the round has ``micros`` micro-batches with those of the same sum."""
        batch = attempt.batch
        held = self._held.get(batch, {})
        if len(held) >= MAX_ATTEMPTS:
            numbers = " and ".join(map(str, sorted(held)))
            raise ResourceExhausted(
                f"{attempt} cannot be staged: attempts {numbers} are held;"
                f" expected at most {MAX_ATTEMPTS}"
            )
        if not held:
            for other in self._held:
                if other.epoch == batch.epoch and (
                    other.first < batch.first + batch.count
                    and batch.first < other.first + other.count
                ):
                    raise InvalidArgument(
                        f"{batch} overlap {other}, which are staged; batches never overlap"
                    )
            if micros >= self._replicas:
                raise ResourceExhausted(
                    f"{attempt} cannot be staged: the round holds {micros} micro-batches"
                    f" already; expected at most {self._replicas}"
                )

    @property
    def attempts(self) -> list[Attempt]:
        """The staged attempts."""
        return [Attempt(batch, n) for batch, held in self._held.items() for n in held]

    def held(self, attempt: Attempt) -> Staged:
        """Returns a staged attempt."""
        return self._held[attempt.batch][attempt.number]

    def stage(self, attempt: Attempt, staged: Staged, everywhere: bool = False) -> None:
        """Stages a new attempt, which :meth:`admit` has admitted. ``everywhere``: all shards hold
        it, since there is only this one."""
        assert not self.holds(attempt)
        self._held.setdefault(attempt.batch, {})[attempt.number] = staged
        if everywhere:
            self.confirm(attempt)

    def confirm(self, attempt: Attempt) -> None:
        """Notes that all shards hold an attempt; ignores one that is not staged here."""
        if self.holds(attempt):
            self._everywhere.add(attempt)

    def is_everywhere(self, attempt: Attempt) -> bool:
        """Whether all shards are known to hold this attempt."""
        return attempt in self._everywhere

    def decide(self, attempts: tuple[Attempt, ...]) -> Ready | Missing:
        """Selects the gradients of the round that names ``attempts``. Changes nothing.

        A micro-batch of n examples has weight float32(n / Σ n), summed over those not skipped. A
        sum has the weight of all its micro-batches, and the place of the one that holds it.

        Raises:
            InvalidArgument: two attempts of one micro-batch are named.
        """
        ordered = sorted(attempts)
        for one, next_one in pairwise(ordered):
            if one.batch == next_one.batch:
                raise InvalidArgument(
                    f"a decision names attempts {one.number} and {next_one.number} of"
                    f" {one.batch}; expected one of each micro-batch"
                )
        named = [(a, self._held.get(a.batch, {}).get(a.number)) for a in ordered]
        missing = tuple(a for a, s in named if s is None or not {*s.summed} <= {*attempts})
        if missing:
            return Missing(missing)
        counting = tuple(staged for _, staged in named if staged is not None)
        skipped = frozenset(a.batch for a, s in named if s is not None and s.gradients is None)
        finite = [
            (s.examples, s.gradients, s.rows)
            for a, s in named
            if s is not None and s.gradients is not None and (not s.summed or a == s.summed[0])
        ]
        total = sum(examples for examples, _, _ in finite)
        parts = tuple(Part(np.float32(n / total), gradients, rows) for n, gradients, rows in finite)
        return Ready(parts, skipped, counting)

    def drop(self, attempt: Attempt) -> Staged | None:
        """Removes one attempt, with all others of its sum, and returns what has the gradient, if
        it is staged."""
        if not self.holds(attempt):
            return None
        all_of_it = self.held(attempt).summed or (attempt,)
        first, *_ = [self._held[each.batch].pop(each.number) for each in all_of_it]
        self._everywhere.difference_update(all_of_it)
        self._held = {batch: held for batch, held in self._held.items() if held}
        return first

    def drop_all(self, batch: BatchId) -> list[Staged]:
        """Removes and returns all attempts of a micro-batch."""
        dropped = self._held.pop(batch, {})
        self._everywhere.difference_update(Attempt(batch, number) for number in dropped)
        return list(dropped.values())

    def clear(self) -> list[Staged]:
        """Removes and returns all attempts, so that the caller can reuse their buffers."""
        dropped = [s for attempts in self._held.values() for s in attempts.values()]
        self._held.clear()
        self._everywhere.clear()
        return dropped


def weighted_mean(parts: tuple[Part, ...]) -> Mapping[str, NDArray]:
    """Returns Σ w_k g_k, summed in the given order with one multiply and one add per element. An
    arena of integers gets the values of the last part, which has the highest batch id.

    The sum overwrites the first gradient's arrays, and the other gradients are scaled in place, so
    none of them may be used as a gradient afterwards.
    """
    total = parts[0].gradients
    if len(parts) == 1:
        # Its weight is 1.
        return total
    for name, gradient in total.items():
        if gradient.dtype == INTEGERS:
            np.copyto(gradient, parts[-1].gradients[name])
            continue
        gradient *= parts[0].weight
        for part in parts[1:]:
            summand = part.gradients[name]
            summand *= part.weight
            gradient += summand
    return total


def mean_rows(parts: tuple[Part, ...]) -> dict[int, Rows]:
    """Returns the weighted mean of rows per table, with the ids of all parts, each once and
    ascending. A part that lacks an id contributes 0 to it."""
    tables = sorted({table for part in parts for table in part.rows})
    return {
        table: weighted_sum([(p.weight, p.rows[table]) for p in parts if table in p.rows])
        for table in tables
    }
