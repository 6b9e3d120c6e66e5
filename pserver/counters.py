"""The figures of a shard that a person or the coordinator may want to see."""

from __future__ import annotations

from dataclasses import dataclass, field

STALENESS_BUCKETS = 64
"""Entry s counts applied pushes of staleness s, the last one all from there on."""


@dataclass(slots=True)
class Counters:
    """Pushes by fate since this process started. Whoever changes them holds the shard's lock."""

    applied: int = 0
    already_applied: int = 0
    staged: int = 0
    skipped: int = 0
    refused: int = 0
    staleness: list[int] = field(default_factory=lambda: [0] * STALENESS_BUCKETS)

    def count_applied(self, staleness: int) -> None:
        """One more push was applied, ``staleness`` versions after the one it came from."""
        self.applied += 1
        self.staleness[min(staleness, STALENESS_BUCKETS - 1)] += 1

    def staleness_counts(self) -> list[int]:
        """The histogram without the zeros at its end."""
        length = max((s for s, count in enumerate(self.staleness) if count), default=-1) + 1
        return self.staleness[:length]


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
