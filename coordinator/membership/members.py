"""Shards and workers, as the coordinator knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from coordinator.core.figures import Position, ReportedTransport, WorkerTimes
from coordinator.membership.progress import TotalsMeter
from psrpc.core.shard_reports import ShardFigures

PER_ADDRESS = 512
"""Most newcomers from one address: enough for all workers of a machine, and twice its concurrent
calls (``psrpc.net.limits.PEER_CALLS``)."""


class Candidate(Protocol):
    """The facts about a present worker that :func:`gives_way` needs."""

    address: str
    """The address without its port, which differs between connections."""
    asked: bool
    """Whether it has asked for work since it registered."""
    worked: bool
    """Whether it has done any work."""
    registered: float
    """When it registered."""


Place = TypeVar("Place", bound=Candidate)


def gives_way(active: Iterable[Place], address: str, most: int) -> Place | None:
    """Returns the newcomer that must give way to one from ``address``; None if there is room, or if
    all ``most`` workers have done work.

    All workers of a job have one certificate, so a registration proves nothing else. A place is
    safe once its worker has done work; until then its worker is a newcomer. So a peer that
    registers a thousand names and does nothing with them displaces only its own newcomers, while
    two hundred workers that start at once find room.

    Candidates are the newcomers of that address, or of the most common one if the job is full. One
    that has not asked for work goes first, then the one that registered first.
    """
    workers = list(active)
    newcomers = [worker for worker in workers if not worker.worked]
    if sum([worker.address == address for worker in newcomers]) >= PER_ADDRESS:
        crowd = address
    elif len(workers) >= most and newcomers:
        held = Counter(worker.address for worker in newcomers)
        # Prefer its own address among the most common ones.
        crowd = max(held, key=lambda one: (held[one], one == address))
    else:
        return None
    mine = (worker for worker in newcomers if worker.address == crowd)
    return min(mine, key=lambda worker: (worker.asked, worker.registered))


@dataclass(slots=True)
class Shard:
    """One shard's place. ``ready`` means that it has begun some generation, ``watching`` that its
    command stream is open, ``watched`` that it once was."""

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
    """When it reported its figures."""
    began_at: int = 0
    """The version at which it began its generation. Before that it may report a lower one."""
    earlier: tuple[float, ShardFigures] | None = None
    """Time and figures of the previous report, in the same generation."""
    load: TotalsMeter = field(default_factory=TotalsMeter)
    """Rates of its version and of gradient bytes."""
    worker: int = 0
    """The incarnation of the worker that hosts it; 0 for a process of its own."""

    def __str__(self) -> str:
        if not self.address:
            return f"shard {self.index}"
        host = f" in the worker with pid {self.pid} on {self.host}," if self.worker else ""
        return f"shard {self.index}{host} at {self.address}"


@dataclass(slots=True)
class Worker:
    """One worker, by its assigned name."""

    name: str
    incarnation: int
    host: str = ""
    pid: int = 0
    device: str = ""
    state: WorkerState = "active"
    certificate: str = ""
    """The common name of its certificate; empty without certificates."""
    secret: bytes = field(default=b"", repr=False)
    """A value that only this process knows."""
    session: bytes = field(default=b"", repr=False)
    """The session that it calls with."""
    seen: float = 0.0
    stored: bool = False
    """Whether an earlier coordinator of the run stored its name and incarnation."""
    hosts: bool = False
    """Whether it can host slices."""
    calm: float = 1.0
    """Factor by which the pauses between its heartbeats are longer than usual; above 1 if there are
    many workers."""
    waiting_for: str = ""
    times: WorkerTimes = field(default_factory=WorkerTimes)
    transports: tuple[ReportedTransport, ...] = ()
    position: Position = field(default_factory=Position)
    unreachable: dict[int, float] = field(default_factory=dict)
    """The shards that it cannot reach, and since when."""
    generation: int = 0
    """The generation in which it reported ``unreachable``."""
    address: str = ""
    registered: float = 0.0
    asked: bool = False
    worked: bool = False
    """See :class:`coordinator.membership.members.Candidate`."""
    serial: str = ""
    """Serial number of the certificate of its last call, see
    :class:`psrpc.security.peer_certificate.Peer`."""

    def stood(self, now: float) -> None:
        """Restarts, at ``now``, the time for which it has made no progress."""
        self.position = replace(self.position, since=now)

    def reaches(self, unreachable: Mapping[int, float], generation: int, now: float) -> bool:
        """Sets the shards of ``generation`` that it cannot reach, each with the seconds for which
        it has not by ``now``; returns whether the set of shards has changed."""
        # In another generation, other processes may be in their places.
        anew, was = generation != self.generation, self.unreachable
        before = {} if anew else was
        self.generation = generation
        self.unreachable = {
            shard: min(before.get(shard, now), now - for_s) for shard, for_s in unreachable.items()
        }
        return self.unreachable.keys() != was.keys() or (anew and bool(unreachable))


@dataclass(frozen=True, slots=True)
class ShardSilent:
    """A shard has been silent for a lease; ``reason`` names it."""

    shard: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker has been silent for a lease, and counts as gone for good."""

    worker: str
    reason: str


ShardState = Literal["missing", "starting", "ready", "silent", "left"]

WorkerState = Literal["active", "silent", "left"]
