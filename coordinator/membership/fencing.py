"""Revokes departed workers, so that no shard accepts their gradients once others repeat the work.

A silent worker may only have been suspended, and come back. Before its work goes to another, every
shard must confirm that it refuses the worker's name and has dropped the attempts that the worker
staged and did not commit.

Pure: the engine's loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core.wording import shards
from psrpc.core.commands import Attempt, Revocation

OFTEN = 3
"""Lapses in a row that cause a warning."""

KEPT = 200
"""Processes whose lapses are remembered."""


class FencingOrders:
    """The revocations of one generation that some shard has not obeyed. Not thread-safe.

    Their numbers rise by one, and a shard obeys them in order, so its greatest obeyed number
    includes all smaller ones.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self.begin()

    def begin(self) -> None:
        """Begins a generation without revocations: its number alone refuses workers that were
        revoked before."""
        self._number = 0
        self._pending: list[Revocation] = []
        self._obeyed = [0] * self._shards

    def add(
        self, worker: str, attempts: Sequence[Attempt], *, ends_ahead: bool = False
    ) -> Revocation:
        """Revokes ``worker``, which had these attempts in flight; returns the order for all shards.
        With ``ends_ahead`` they also apply no more rounds that were decided ahead."""
        self._number += 1
        revocation = Revocation(self._number, worker, tuple(attempts), ends_ahead)
        self._pending.append(revocation)
        return revocation

    def obeyed(self, shard: int, number: int) -> list[str]:
        """Notes that ``shard`` has obeyed all up to ``number``; returns workers obeyed by all."""
        self._obeyed[shard] = max(self._obeyed[shard], min(number, self._number))
        obeyed_by_all = min(self._obeyed)
        free = [r.worker for r in self._pending if r.number <= obeyed_by_all]
        self._pending = [r for r in self._pending if r.number > obeyed_by_all]
        return free

    def missed(self, shard: int) -> list[Revocation]:
        """Returns the revocations that ``shard`` has not confirmed."""
        return [r for r in self._pending if r.number > self._obeyed[shard]]

    def waiting_for(self) -> str:
        """Says which shards have to refuse which workers; empty when all do."""
        parts = []
        for revocation in self._pending:
            late = [shard for shard, n in enumerate(self._obeyed) if n < revocation.number]
            parts.append(f"{shards(late)} to refuse {revocation.worker}")
        return "; ".join(parts)


class FlapDetector:
    """Counts lapses by incarnation: a process that was taken for gone and comes back has another
    name, but the same incarnation. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, incarnation: int) -> bool:
        """Counts a lapse of a process; returns whether it is the :data:`OFTEN`-th without a batch
        done in between."""
        count = self._counts.pop(incarnation, 0) + 1
        self._counts[incarnation] = count  # the newest last
        if len(self._counts) > KEPT:
            del self._counts[next(iter(self._counts))]
        return count == OFTEN

    def done(self, incarnation: int) -> None:
        """Resets the count of a process that has done batches."""
        self._counts.pop(incarnation, None)
