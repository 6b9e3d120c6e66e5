"""Shards and workers, as the coordinator knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from coordinator.core.figures import ShardFigures, Transport, WorkerTimes
from coordinator.core.wording import Position
from coordinator.membership.progress import TotalsMeter


@dataclass(slots=True)
class Shard:
    """One shard's place. ``ready`` means that it has begun some generation, ``watching`` that its
    command stream is open, ``watched`` that it has been."""

    index: int
    incarnation: int = 0
    address: str = ""
    host: str = ""
    pid: int = 0
    state: ShardState = "missing"
    ready: bool = False
    watching: bool = False
    watched: bool = False
    seen: float = 0.0
    figures: ShardFigures = field(default_factory=ShardFigures)
    told: float = 0.0
    """When it told its figures."""
    began_at: int = 0
    """The version with which it began its generation; while it restores, it tells of less."""
    earlier: tuple[float, ShardFigures] | None = None
    """When it told them the time before, in the same generation, and the figures of then."""
    load: TotalsMeter = field(default_factory=TotalsMeter)
    """Of its version and the bytes of gradients."""

    def __str__(self) -> str:
        return f"shard {self.index} at {self.address}" if self.address else f"shard {self.index}"


@dataclass(slots=True)
class Worker:
    """One worker, by the id that it was given."""

    name: str
    incarnation: int
    host: str = ""
    pid: int = 0
    device: str = ""
    state: WorkerState = "active"
    certificate: str = ""
    """The common name of the certificate that it calls with; empty without certificates."""
    secret: bytes = field(default=b"", repr=False)
    """What only this process knows."""
    session: bytes = field(default=b"", repr=False)
    """What it calls with."""
    seen: float = 0.0
    waiting_for: str = ""
    times: WorkerTimes = field(default_factory=WorkerTimes)
    transports: tuple[Transport, ...] = ()
    position: Position = field(default_factory=Position)
    unreachable: dict[int, float] = field(default_factory=dict)
    """The shards that it cannot reach, and since when."""
    generation: int = 0
    """The one that it stood at when it said so."""
    address: str = ""
    registered: float = 0.0
    asked: bool = False
    worked: bool = False
    """See :class:`coordinator.membership.newcomers.Candidate`."""
    serial: str = ""
    """Of the certificate that it called with last, see
    :class:`psrpc.security.peer_certificate.Peer`."""

    def stood(self, now: float) -> None:
        """That it has not moved by ``now`` does not count."""
        self.position = replace(self.position, since=now)

    def reaches(self, unreachable: Mapping[int, float], generation: int, now: float) -> bool:
        """Takes the shards of ``generation`` that it cannot reach, and for how long by ``now``;
        whether others than before."""
        # In another generation, other processes may be at their places.
        anew, was = generation != self.generation, self.unreachable
        before = {} if anew else was
        self.generation = generation
        self.unreachable = {
            shard: min(before.get(shard, now), now - for_s) for shard, for_s in unreachable.items()
        }
        return self.unreachable.keys() != was.keys() or (anew and bool(unreachable))


@dataclass(frozen=True, slots=True)
class ShardSilent:
    """A shard has given no sign of life for a lease; ``reason`` names it."""

    shard: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker has given no sign of life for a lease, and is taken for gone for good."""

    worker: str
    reason: str


ShardState = Literal["missing", "starting", "ready", "silent", "left"]

WorkerState = Literal["active", "silent", "left"]
