"""Figures that workers report about themselves, and the rule that finds stuck workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from coordinator.core.wording import duration
from coordinator.core.work import Report


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
        """Returns the time since ``earlier``; all of it if the process was replaced."""
        mine, others = self.by_cause(), earlier.by_cause()
        if self.total < earlier.total:
            return self
        return WorkerTimes(**{cause: max(0.0, mine[cause] - others[cause]) for cause in CAUSES})

    def shares(self) -> dict[str, float]:
        """Returns fractions by cause; empty while the total is 0."""
        total = self.total
        return {cause: s / total for cause, s in self.by_cause().items()} if total else {}


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """A heartbeat of a worker; ``unreachable`` are the shards that do not answer it, each with the
    seconds for which it has not."""

    generation: int
    reports: Sequence[Report] = ()
    waiting_for: str = ""
    times: WorkerTimes | None = None
    unreachable: Mapping[int, float] | None = None
    position: Position | None = None
    transports: tuple[ReportedTransport, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerRegistration:
    """A worker's request to register. ``secret``, known to its process alone, shows that a repeated
    request comes from the same process, ``certificate`` is the name in the caller's certificate,
    ``address`` where it calls from."""

    incarnation: int
    host: str
    pid: int
    device: str
    job_sha256: str
    software: str
    settings_sha256: str = ""
    secret: bytes = b""
    certificate: str = ""
    address: str = ""
    hosts: bool = False
    """Whether the process can host slices."""


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


Phase = Literal["", "waiting", "data", "compiling", "computing", "exchanging"]
"""The activity of a worker's main thread; empty if unknown."""

JUDGED: tuple[Phase, ...] = ("computing", "exchanging")
"""Phases that must end. Data may take any time, as may the first batch of a size, which compiles;
in the other phases the worker delays no other process."""

LEAST_S = 60.0
"""Seconds without progress before which a worker never counts as stuck."""

MEDIANS = 10.0
"""Multiple of a worker's own median step before which it does not count as stuck either."""


@dataclass(frozen=True, slots=True)
class Position:
    """A worker's progress as it last reported it.

    Attributes:
        phase: its activity.
        count: rises with every change of phase.
        median_step_s: median duration of its last steps, without waits for others; 0 before the
            first.
        since: when this phase and count were first reported.
    """

    phase: Phase = ""
    count: int = 0
    median_step_s: float = 0.0
    since: float = 0.0

    def then(self, later: Position) -> Position:
        """Returns ``later``, dated back to ``self.since`` if nothing has changed."""
        if (later.phase, later.count) != (self.phase, self.count):
            return later
        return Position(later.phase, later.count, later.median_step_s, self.since)


def stands_still(position: Position, now: float) -> str:
    """Says why a worker at ``position`` counts as stuck; empty while it does not."""
    if position.phase not in JUDGED or position.median_step_s <= 0:
        return ""
    limit_s = max(LEAST_S, MEDIANS * position.median_step_s)
    stood_s = now - position.since
    if stood_s <= limit_s:
        return ""
    return (
        f"has been {position.phase} without moving (for {duration(stood_s)}); its median step "
        f"takes {duration(position.median_step_s)}, and {duration(limit_s)} are allowed"
    )
