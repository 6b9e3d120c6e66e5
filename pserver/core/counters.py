"""Counters of a shard, for users and the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

STALENESS_BUCKETS = 64
"""Entry s counts applied pushes of staleness s; the last entry also counts all larger ones."""

MAX_WORKERS = 256
"""Maximum number of workers counted by name; the least recently active are dropped."""


def _zeros() -> list[int]:
    return [0] * STALENESS_BUCKETS


@dataclass(slots=True)
class Counters:
    """Pushes by outcome since the process started. Callers that change them hold the shard's lock.

    Attributes:
        staleness: of applied pushes, see :data:`STALENESS_BUCKETS`.
        workers: worker -> its own ``staleness``; the worker that pushed last is at the end.
        too_stale: pushes staler than the policy allows.
        uncompensated: stale pushes that could not be corrected although the policy requires it.
        apply_s: seconds spent in updates.
        gradient_nbytes: bytes of received gradients, as encoded.
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
        """Counts a push applied ``staleness`` versions after its base version."""
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
        """Returns a copy with trailing zeros trimmed from its histograms. Any thread may call
        it."""
        # list() copies in one atomic step.
        workers = {worker: _trimmed(counts) for worker, counts in list(self.workers.items())}
        return replace(self, staleness=_trimmed(self.staleness), workers=workers)


def _trimmed(counts: list[int]) -> list[int]:
    length = max((s for s, count in enumerate(counts) if count), default=-1) + 1
    return counts[:length]


@dataclass(frozen=True, slots=True)
class ShardReport:
    """State of a shard at one moment, see ``GetStatusResponse`` and ``HeartbeatShardRequest``."""

    generation: int
    version: int
    initialized: bool
    revoked: int
    nbytes: int
    counters: Counters
    staged_now: int
    waiting_for: str


@dataclass(frozen=True, slots=True)
class Rates:
    """Computes the factor that multiplies the learning rate. Pure.

    Attributes:
        scale: k, reached by a gradual warm-up (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
            section 2.2).
        warmup_updates: T, updates until k is reached; with 0, k applies from the first update.
        inverse: also divide by 1 + staleness (Zhang et al. 2016, "Staleness-aware Async-SGD",
            section 3.2; the paper divides by the staleness itself, which is never 0 there).
    """

    scale: float = 1.0
    warmup_updates: int = 0
    inverse: bool = False

    def factor(self, iterations: int, staleness: int = 0) -> float:
        """Returns (1 + (k - 1) · min(1, i / T)) / (1 + τ), where τ counts only if ``inverse``;
        exactly 1.0 with the defaults.

        Args:
            iterations: i, updates that the optimizer has already made.
            staleness: τ, updates since the parameters that the gradient was computed from.
        """
        factor = self.scale
        if iterations < self.warmup_updates:
            factor = 1.0 + (self.scale - 1.0) * (iterations / self.warmup_updates)
        if self.inverse:
            factor /= 1 + staleness
        return factor
