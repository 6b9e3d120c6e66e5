"""The figures of a shard that a person or the coordinator may want to see."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

STALENESS_BUCKETS = 64
"""Entry s counts applied pushes of staleness s, the last one all from there on."""

MAX_WORKERS = 256
"""Workers that are counted by name; of more, those that have been silent longest are forgotten."""


def _zeros() -> list[int]:
    return [0] * STALENESS_BUCKETS


@dataclass(slots=True)
class Counters:
    """Pushes by fate since this process started. Whoever changes them holds the shard's lock.

    Attributes:
        staleness: of applied pushes, see :data:`STALENESS_BUCKETS`.
        workers: the same by the worker that pushed, who did so last at the end.
        too_stale: pushes that were staler than the policy allows.
        uncompensated: stale pushes that should have been corrected for it and could not be.
        apply_s: seconds spent in updates.
        gradient_nbytes: bytes of gradients that have come, as they were encoded.
    """

    applied: int = 0
    already_applied: int = 0
    staged: int = 0
    skipped: int = 0
    refused: int = 0
    too_stale: int = 0
    uncompensated: int = 0
    apply_s: float = 0.0
    gradient_nbytes: int = 0
    staleness: list[int] = field(default_factory=_zeros)
    workers: dict[str, list[int]] = field(default_factory=dict)

    def count_applied(self, worker: str, staleness: int) -> None:
        """One more push was applied, ``staleness`` versions after the one it came from."""
        self.applied += 1
        bucket = min(staleness, STALENESS_BUCKETS - 1)
        self.staleness[bucket] += 1
        own = self.workers.pop(worker, None)
        if own is None:
            own = _zeros()
            if len(self.workers) >= MAX_WORKERS:
                del self.workers[next(iter(self.workers))]
        own[bucket] += 1
        self.workers[worker] = own

    def reported(self) -> Counters:
        """A copy, its histograms without the zeros at their ends. Any thread may ask."""
        # A list is made in one step.
        workers = {worker: _trimmed(counts) for worker, counts in list(self.workers.items())}
        return replace(self, staleness=_trimmed(self.staleness), workers=workers)


def _trimmed(counts: list[int]) -> list[int]:
    length = max((s for s, count in enumerate(counts) if count), default=-1) + 1
    return counts[:length]


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A shard at one moment, see ``GetStatusResponse`` and ``HeartbeatShardRequest``."""

    generation: int
    version: int
    initialized: bool
    revoked: int
    nbytes: int
    counters: Counters
    staged_now: int
    waiting_for: str
