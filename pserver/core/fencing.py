"""Which workers a shard refuses, because the coordinator has taken them for gone."""

from __future__ import annotations

from psrpc.core.errors import ResourceExhausted, StaleGeneration

MAX_REVOKED = 1 << 16
"""Workers that may be revoked in one generation: some 10 MB of names."""


class Revocations:
    """The revocations of one generation. Whoever obeys holds the shard's lock; any thread reads."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.number = 0
        """The greatest that was obeyed. Set last: whoever reads it may lease that worker's
        batches to others."""
        self._workers: set[str] = set()

    def refuse(self, worker: str) -> None:
        """Refuses ``worker`` from now on.

        Raises:
            ResourceExhausted: there are too many. Forgetting one would let a worker push whose
                work has been given to others, so this shard has to begin anew.
        """
        if len(self._workers) >= MAX_REVOKED and worker not in self._workers:
            raise ResourceExhausted(
                f"{MAX_REVOKED} workers were revoked in generation {self.generation} already;"
                " no more can be remembered"
            )
        self._workers.add(worker)

    def check(self, worker: str) -> None:
        """Passes a worker that was not revoked.

        Raises:
            StaleGeneration: it was; it has to register again.
        """
        if worker in self._workers:
            raise StaleGeneration(
                f"{worker} was taken for gone in generation {self.generation}: register again"
            )
