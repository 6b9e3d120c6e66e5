"""Who is there: shards by index, workers by id, each with an incarnation and signs of life.

Pure: time comes in, and nothing here locks; the engine's loop is the only caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from psrpc.errors import AlreadyExists, InvalidArgument, StaleGeneration

ShardState = Literal["missing", "starting", "ready", "silent", "left"]
WorkerState = Literal["active", "silent", "left"]


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """What a shard tells about itself with each sign of life."""

    version: int = 0
    applied: int = 0
    already_applied: int = 0
    skipped: int = 0
    refused: int = 0
    waiting_for: str = ""


@dataclass(slots=True)
class Shard:
    """One shard's place. ``initialized`` means that it holds parameters."""

    index: int
    incarnation: int = 0
    address: str = ""
    host: str = ""
    pid: int = 0
    state: ShardState = "missing"
    ready: bool = False
    initialized: bool = False
    seen: float = 0.0
    figures: ShardFigures = field(default_factory=ShardFigures)

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
    seen: float = 0.0
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class ShardSilent:
    """A shard has given no sign of life for a lease; ``reason`` names it."""

    shard: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker has given no sign of life for a lease: its work goes to others."""

    worker: str
    reason: str


Effect: TypeAlias = ShardSilent | WorkerSilent


class Membership:
    """Places for ``shards`` shards and any number of workers. Not thread-safe."""

    def __init__(self, shards: int, lease_s: float) -> None:
        self.shards = [Shard(index) for index in range(shards)]
        self.workers: dict[str, Worker] = {}
        self._lease_s = lease_s
        self._ticked: float | None = None

    @property
    def active_workers(self) -> int:
        """Workers that are there."""
        return sum(w.state == "active" for w in self.workers.values())

    @property
    def shards_ready(self) -> bool:
        """Whether every shard has been built (and restored, if it was told to)."""
        return all(s.ready for s in self.shards)

    def register_shard(
        self, index: int, incarnation: int, address: str, host: str, pid: int, now: float
    ) -> Shard:
        """A shard process takes its place. Repeating it is safe.

        A place is free when nobody has it, or when who had it has fallen silent before it held
        any parameters.

        Raises:
            InvalidArgument: there is no such index.
            AlreadyExists: another process has the place; names it.
        """
        if not 0 <= index < len(self.shards):
            raise InvalidArgument(
                f"shard index {index} is out of range: this job has {len(self.shards)} "
                f"shard{'s' if len(self.shards) > 1 else ''}, so --shard is "
                f"{'0' if len(self.shards) == 1 else f'0 to {len(self.shards) - 1}'}; "
                "see `coordinator serve --shards`"
            )
        shard = self.shards[index]
        if shard.incarnation not in (0, incarnation):
            held = f"{shard} (pid {shard.pid} on {shard.host})"
            if shard.state not in ("silent", "left"):
                raise AlreadyExists(
                    f"shard {index} is held by another process: {held}; start this one with "
                    "another --shard, or stop that one first"
                )
            if shard.initialized:
                raise AlreadyExists(
                    f"{held} is gone for {now - shard.seen:.0f} s and held parameters that a new "
                    "process does not have; stop the job and start it again with --resume"
                )
        if shard.incarnation != incarnation:
            shard = self.shards[index] = Shard(index)
        shard.incarnation, shard.address, shard.host, shard.pid = incarnation, address, host, pid
        shard.seen = now
        shard.state = "ready" if shard.ready else "starting"
        return shard

    def shard_ready(self, index: int, incarnation: int, initialized: bool, now: float) -> None:
        """A shard has been built. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        shard.ready, shard.seen, shard.state = True, now, "ready"
        shard.initialized = shard.initialized or initialized

    def shard_beat(self, index: int, incarnation: int, figures: ShardFigures, now: float) -> None:
        """A sign of life of a shard. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        shard.figures = figures
        self._shard_seen(shard, now)

    def shard_seen(self, index: int, incarnation: int, now: float) -> Shard:
        """A shard called, which is a sign of life too. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        self._shard_seen(shard, now)
        return shard

    def shard_left(self, index: int, incarnation: int) -> None:
        """A shard has been told that the job is over."""
        if self.shards[index].incarnation == incarnation:
            self.shards[index].state = "left"

    def initialized(self) -> None:
        """Every shard holds parameters now."""
        for shard in self.shards:
            shard.initialized = True

    def register_worker(
        self, incarnation: int, host: str, pid: int, device: str, now: float
    ) -> Worker:
        """A worker gets an id; the same one again if it repeats itself."""
        for worker in self.workers.values():
            if worker.incarnation == incarnation and worker.state != "left":
                worker.seen, worker.state = now, "active"
                return worker
        name = f"worker-{len(self.workers)}"
        worker = Worker(name, incarnation, host, pid, device, "active", now)
        self.workers[name] = worker
        return worker

    def worker_seen(self, name: str, incarnation: int, now: float) -> bool:
        """A sign of life of a worker. False when it is not known, has left, or was taken for
        gone in the meantime; who was taken for gone is active again."""
        worker = self.workers.get(name)
        if worker is None or worker.incarnation != incarnation or worker.state == "left":
            return False
        was_active = worker.state == "active"
        worker.seen, worker.state = now, "active"
        return was_active

    def worker(self, name: str, incarnation: int, now: float) -> Worker:
        """The worker that calls, which is a sign of life too.

        Raises:
            StaleGeneration: the coordinator does not know it: register again.
        """
        self.worker_seen(name, incarnation, now)
        worker = self.workers.get(name)
        if worker is None or worker.incarnation != incarnation or worker.state == "left":
            raise StaleGeneration(f"{name or 'a worker without a name'} is not registered here")
        return worker

    def leave_worker(self, name: str, incarnation: int) -> bool:
        """A worker goes; whether it was there."""
        worker = self.workers.get(name)
        if worker is None or worker.incarnation != incarnation or worker.state == "left":
            return False
        worker.state = "left"
        return True

    def tick(self, now: float) -> list[Effect]:
        """Who has fallen silent since the last tick.

        A tick that comes more than half a lease late means that this process stood still, and
        with it every sign of life on its way in: all leases are renewed before any is judged.
        """
        late = self._ticked is not None and now - self._ticked > self._lease_s / 2
        self._ticked = now
        if late:
            for shard in self.shards:
                shard.seen = now
            for worker in self.workers.values():
                worker.seen = now
            return []
        effects: list[Effect] = []
        for shard in self.shards:
            if shard.state in ("starting", "ready") and now - shard.seen > self._lease_s:
                shard.state = "silent"
                effects.append(ShardSilent(shard.index, self._silence(shard, now)))
        for worker in self.workers.values():
            if worker.state == "active" and now - worker.seen > self._lease_s:
                worker.state = "silent"
                reason = f"{worker.name} has been silent for {now - worker.seen:.0f} s"
                effects.append(WorkerSilent(worker.name, reason))
        return effects

    def lost_shard(self, now: float, lost_s: float) -> str:
        """The shard that has taken parameters with it and been silent for ``lost_s``, in words;
        empty when there is none. One without parameters can be replaced."""
        lost = (s for s in self.shards if s.state == "silent" and s.initialized)
        return next((self._silence(s, now) for s in lost if now - s.seen > lost_s), "")

    def waiting_for_shards(self, now: float) -> str:
        """Which shards are missing, starting or silent, in words; empty when all are there."""
        missing = [str(s.index) for s in self.shards if s.state == "missing"]
        parts = []
        if missing:
            parts.append(f"shard{'s' if len(missing) > 1 else ''} {', '.join(missing)} to register")
        parts += [f"{s} to start" for s in self.shards if s.state == "starting"]
        parts += [self._silence(s, now) for s in self.shards if s.state == "silent"]
        return "; ".join(parts)

    def _silence(self, shard: Shard, now: float) -> str:
        return f"{shard} has been silent for {now - shard.seen:.0f} s"

    def _shard(self, index: int, incarnation: int) -> Shard:
        if not 0 <= index < len(self.shards):
            raise InvalidArgument(f"there is no shard {index} in a job of {len(self.shards)}")
        shard = self.shards[index]
        if shard.incarnation != incarnation:
            raise StaleGeneration(
                f"shard {index} is held by another process"
                if shard.incarnation
                else f"shard {index} has not registered here"
            )
        return shard

    def _shard_seen(self, shard: Shard, now: float) -> None:
        shard.seen = now
        if shard.state == "silent":
            shard.state = "ready" if shard.ready else "starting"
