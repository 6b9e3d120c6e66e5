"""Workers that are gone: their work is given to others only when no shard takes theirs any more.

A worker that was silent may only have stood still. Before its work goes to another, every shard
is told to refuse its name and to drop what it has staged and not committed, and must have said
that it does.

Pure: the engine's loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core.wording import shards
from coordinator.core.work import Attempt, Revocation

OFTEN = 3
"""Lapses in a row that are worth a warning."""

KEPT = 200
"""Processes that are remembered."""


class Revocations:
    """The revocations of one generation that not every shard has obeyed. Not thread-safe.

    Their numbers rise by one, and a shard obeys them in order, so the greatest it has obeyed says
    all.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self.begin()

    def begin(self) -> None:
        """A generation begins: whoever was revoked before cannot reach it."""
        self._number = 0
        self._pending: list[Revocation] = []
        self._obeyed = [0] * self._shards

    def add(self, worker: str, attempts: Sequence[Attempt]) -> Revocation:
        """``worker`` is gone and had these attempts under way; the order for all shards."""
        self._number += 1
        revocation = Revocation(self._number, worker, tuple(attempts))
        self._pending.append(revocation)
        return revocation

    def obeyed(self, shard: int, number: int) -> list[str]:
        """``shard`` has obeyed all up to ``number``; the workers whose work is free since."""
        self._obeyed[shard] = max(self._obeyed[shard], min(number, self._number))
        everyone = min(self._obeyed)
        free = [r.worker for r in self._pending if r.number <= everyone]
        self._pending = [r for r in self._pending if r.number > everyone]
        return free

    def missed(self, shard: int) -> list[Revocation]:
        """What ``shard`` has not said that it obeys."""
        return [r for r in self._pending if r.number > self._obeyed[shard]]

    def waiting_for(self) -> str:
        """Which shards have to refuse whom, in words; empty when all do."""
        parts = []
        for revocation in self._pending:
            late = [shard for shard, n in enumerate(self._obeyed) if n < revocation.number]
            parts.append(f"{shards(late)} to refuse {revocation.worker}")
        return "; ".join(parts)


class Lapses:
    """Counts by incarnation: a process that was taken for gone and comes back is the same one under
    another name. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, incarnation: int) -> bool:
        """A process has fallen silent; whether it has done so :data:`OFTEN` times by now, with no
        batch done in between."""
        count = self._counts.pop(incarnation, 0) + 1
        self._counts[incarnation] = count  # the newest last
        if len(self._counts) > KEPT:
            del self._counts[next(iter(self._counts))]
        return count == OFTEN

    def done(self, incarnation: int) -> None:
        """A process has done batches."""
        self._counts.pop(incarnation, None)
