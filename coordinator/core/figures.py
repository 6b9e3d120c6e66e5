"""Figures that shards and workers report with each heartbeat.

All counts start with the process, so those of a restarted process begin at 0 again. A sum over
shards or workers covers the present processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

MAX_WORKERS = 256
"""Most workers whose figures are kept apart."""

MAX_COUNTS = 256
"""Most entries of a histogram that are read. Shards send 64."""


@dataclass(frozen=True, slots=True)
class ReportedTotals:
    """Sums over the ``records`` of an epoch that a shard has applied: :mod:`psrpc.core.batch`."""

    epoch: int
    records: int
    totals: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """Figures of a shard. ``staleness_counts[s]`` is the number of pushes applied with staleness s,
    the last entry counts all above; ``workers`` are the same counts by worker. ``apply_s`` are the
    seconds of its updates; see HeartbeatShardRequest for the others."""

    version: int = 0
    applied: int = 0
    already_applied: int = 0
    skipped: int = 0
    refused: int = 0
    waiting_for: str = ""
    generation: int = 0
    staleness_counts: tuple[int, ...] = ()
    workers: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    too_stale: int = 0
    uncompensated: int = 0
    apply_s: float = 0.0
    gradient_nbytes: int = 0
    memory_nbytes: int = 0
    table_rows: int = 0
    table_nbytes: int = 0
    epochs: tuple[ReportedTotals, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportedTransport:
    """The transport of a worker's tensors to a shard; see the message of the same name."""

    shard: int
    kind: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """Where a worker's time has gone, in seconds; see the message of the same name."""

    data: float = 0.0
    compute: float = 0.0
    barrier: float = 0.0
    network: float = 0.0
    apply: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.data + self.compute + self.barrier + self.network + self.apply

    def by_cause(self) -> dict[str, float]:
        """Returns seconds by cause."""
        return {cause: getattr(self, cause) for cause in CAUSES}

    def since(self, earlier: WorkerTimes) -> WorkerTimes:
        """Returns the time after ``earlier``; all of it, if the process was replaced."""
        mine, others = self.by_cause(), earlier.by_cause()
        if self.total < earlier.total:
            return self
        return WorkerTimes(**{cause: max(0.0, mine[cause] - others[cause]) for cause in CAUSES})

    def shares(self) -> dict[str, float]:
        """Returns fractions by cause; empty while the total is 0."""
        total = self.total
        return {cause: s / total for cause, s in self.by_cause().items()} if total else {}


CAUSES: tuple[str, ...] = tuple(f.name for f in fields(WorkerTimes))
"""The causes of a worker's time."""


def add_counts(histograms: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Adds histograms of any lengths, entry by entry."""
    total: list[int] = []
    for counts in histograms:
        total += [0] * (len(counts) - len(total))
        for value, count in enumerate(counts):
            total[value] += count
    return tuple(total)
