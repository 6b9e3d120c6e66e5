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


@dataclass(frozen=True, slots=True)
class Rates:
    """Pure.

    Attributes:
        scale: k, reached by a gradual warm-up (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
            section 2.2).
        warmup_updates: T, how many updates it takes; 0 scales from the first.
        inverse: divide by 1 + staleness as well (Zhang et al. 2016, "Staleness-aware Async-SGD",
            section 3.2, there with the staleness itself, which is never 0).
    """

    scale: float = 1.0
    warmup_updates: int = 0
    inverse: bool = False

    def factor(self, iterations: int, staleness: int = 0) -> float:
        """(1 + (k - 1) · min(1, i / T)) / (1 + τ); exactly 1.0 where nothing is asked for.

        Args:
            iterations: i, the updates that the optimizer has done before.
            staleness: τ, the updates since the parameters that the gradient is of.
        """
        factor = self.scale
        if iterations < self.warmup_updates:
            factor = 1.0 + (self.scale - 1.0) * (iterations / self.warmup_updates)
        if self.inverse:
            factor /= 1 + staleness
        return factor
