"""The members of a run: shards by index and workers by name, each with incarnation and lease.

Pure: time is passed in, and nothing locks; the engine's loop is the only caller.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from coordinator.core.wording import shards
from coordinator.membership.members import Shard, ShardSilent, Worker, WorkerSilent, gives_way
from psrpc.core.errors import (
    AccessDenied,
    AlreadyExists,
    InvalidArgument,
    ResourceExhausted,
    StaleGeneration,
)
from psrpc.core.shard_reports import ShardFigures

LEASE_S = 10.0
"""Silence in seconds after which a shard or worker counts as gone."""

STARTING_S = 3.0
"""Silence in seconds after which a shard without a command stream is not counted on: three
heartbeats. A shard that never had a stream holds nothing, so its place is then free."""

KEPT_WORKERS = 200
"""Departed workers that are still remembered."""

MAX_ACTIVE = 1024
"""Concurrent workers: twice as many as a shard has room for (``psrpc.net.limits.CONVERSATIONS``),
since killed ones count until their leases lapse. The status of all of them fits in a message."""

BARRED = 1000
"""Processes barred by an operator that are remembered."""

FORMER = 100
"""Former holders of a shard's place that are remembered."""

Effect: TypeAlias = ShardSilent | WorkerSilent


class Membership:
    """Places for ``shards`` shards and any number of workers. Not thread-safe."""

    def __init__(
        self,
        shards: int,
        lease_s: float,
        former: Mapping[int, Iterable[int]] | None = None,
        names: Mapping[int, str] | None = None,
        last: Mapping[int, int] | None = None,
        barred: Mapping[str, str] | None = None,
    ) -> None:
        """The arguments are what an earlier coordinator of the run stored: replaced (``former``)
        incarnations of shards by index, and the ``last`` one, which may still run; ``names`` of
        workers by incarnation, the newest last; ``barred`` processes."""
        self.shards = [Shard(index) for index in range(shards)]
        self.workers: dict[str, Worker] = {}
        self._sessions: dict[bytes, str] = {}
        self.barred = dict(barred or {})
        """Worker names of processes that may not register again, by the digest of their secret, the
        newest last."""
        self.lease_s = lease_s
        self._ticked: float | None = None
        self._former = [list((former or {}).get(index, ())) for index in range(shards)]
        self._last = [(last or {}).get(index, 0) for index in range(shards)]
        self._names = dict(names or {})
        self._next_worker = 1 + max(
            (int(name.rpartition("-")[2]) for name in self._names.values()), default=-1
        )

    @property
    def active_workers(self) -> int:
        """Number of active workers."""
        return sum(w.state == "active" for w in self.workers.values())

    def register_shard(
        self, index: int, incarnation: int, address: str, host: str, pid: int, now: float
    ) -> bool:
        """Gives a shard process its place; returns whether the process is new there. Idempotent.

        A place is free when no process holds it, when the holder's command stream has ended, or
        when the holder has been silent for a lease.

        Raises:
            InvalidArgument: there is no such index.
            AlreadyExists: another process, which the message names, has the place.
            StaleGeneration: the process had the place before and was replaced.
        """
        if not 0 <= index < len(self.shards):
            raise InvalidArgument(
                f"shard index {index} is out of range: this job has {len(self.shards)} "
                f"shard{'s' if len(self.shards) > 1 else ''}, so --shard is "
                f"{'0' if len(self.shards) == 1 else f'0 to {len(self.shards) - 1}'}; "
                "see `coordinator serve --shards`",
                code="PS134",
            )
        if incarnation in self._former[index]:
            raise StaleGeneration(f"shard {index} was taken over by another process")
        shard = self.shards[index]
        new = shard.incarnation != incarnation
        if new and shard.incarnation and not self._free(shard, now):
            raise AlreadyExists(
                f"shard {index} is held by another process: {shard} (pid {shard.pid} on "
                f"{shard.host}); start this one with another --shard, or stop that one first",
                code="PS121",
            )
        if new:
            if self._last[index] not in (0, incarnation):
                self._former[index] = [*self._former[index], self._last[index]][-FORMER:]
            self._last[index] = incarnation
            shard = self.shards[index] = Shard(index)
        shard.incarnation, shard.address, shard.host, shard.pid = incarnation, address, host, pid
        shard.seen = now
        shard.state = "ready" if shard.ready else "starting"
        return new

    def knows_shard(self, index: int, incarnation: int) -> bool:
        """Whether a process need not register: its place is taken, or it lost it to another."""
        if not 0 <= index < len(self.shards):
            return True
        return self.shards[index].incarnation != 0 or incarnation in self._former[index]

    def shard_ready(self, index: int, incarnation: int, version: int, now: float) -> None:
        """Notes that a shard has begun a generation at ``version``. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        shard.ready, shard.seen, shard.state = True, now, "ready"
        shard.began_at, shard.earlier = version, None

    def shard_watches(self, index: int, incarnation: int, now: float) -> None:
        """Notes that a shard has opened its command stream. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        shard.watching = shard.watched = True
        self._shard_seen(shard, now)

    def shard_stopped_watching(self, index: int, incarnation: int) -> None:
        """Notes that a shard's newest command stream has ended."""
        if self.shards[index].incarnation == incarnation:
            self.shards[index].watching = False

    def shard_beat(self, index: int, incarnation: int, figures: ShardFigures, now: float) -> None:
        """Records a shard's heartbeat. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        before = shard.figures
        again = before.generation == figures.generation and before.version >= shard.began_at
        shard.earlier = (shard.told, before) if again else None
        shard.figures, shard.told = figures, now
        if not again:
            shard.load.clear()
        shard.load.tell(now, figures.version, figures.gradient_nbytes)
        self._shard_seen(shard, now)

    def shard_seen(self, index: int, incarnation: int, now: float) -> Shard:
        """Renews the lease of a shard that called. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        self._shard_seen(shard, now)
        return shard

    def shard_left(self, index: int, incarnation: int) -> None:
        """Notes that a shard has heard that the job is over."""
        if self.shards[index].incarnation == incarnation:
            self.shards[index].state = "left"

    def displaced_by(
        self, incarnation: int, address: str, certificate: str = "", secret: bytes = b""
    ) -> Worker | None:
        """Returns the worker that must give way before a process from ``address`` can register; see
        :func:`coordinator.membership.members.gives_way`."""
        if _digest(secret) in self.barred or self.active_worker(incarnation, certificate, secret):
            return None
        active = (worker for worker in self.workers.values() if worker.state == "active")
        return gives_way(active, address, MAX_ACTIVE)

    def register_worker(
        self,
        incarnation: int,
        host: str,
        pid: int,
        device: str,
        now: float,
        certificate: str = "",
        secret: bytes = b"",
        address: str = "",
    ) -> Worker:
        """Registers a worker; a process that repeats itself and is not gone gets the same one.

        Args:
            certificate: the common name of the caller's certificate.
            secret: a value that only this process knows.
            address: the caller's address without the port.

        Raises:
            AccessDenied: the process is barred.
            ResourceExhausted: there are :data:`MAX_ACTIVE` others, and none gave way.
        """
        barred = self.barred.get(_digest(secret))
        if barred is not None:
            raise AccessDenied(
                f"this process was {barred}, which was revoked: it may not register again",
                code="PS307",
            )
        known = self.active_worker(incarnation, certificate, secret)
        if known is not None:
            known.seen = now
            return known
        if sum(worker.state == "active" for worker in self.workers.values()) >= MAX_ACTIVE:
            raise ResourceExhausted(
                f"this job has {MAX_ACTIVE} workers, as many as it can have; one that was killed "
                "counts until its lease has lapsed"
            )
        name = self._names.pop(incarnation, "")
        if not name:
            name = f"worker-{self._next_worker}"
            self._next_worker += 1
        worker = Worker(
            name, incarnation, host, pid, device, "active", certificate, secret, seen=now
        )
        worker.address, worker.registered = address, now
        for earlier in self.workers.values():
            if earlier.incarnation == incarnation:
                # Registering again repairs no route; the worker reports once a shard is reachable.
                worker.unreachable = dict(earlier.unreachable)
                worker.generation = earlier.generation
        self.workers[name] = worker
        gone = [w.name for w in self.workers.values() if w.state != "active"]
        for old in gone[: max(0, len(gone) - KEPT_WORKERS)]:
            self._sessions.pop(self.workers.pop(old).session, None)
        return worker

    def active_worker(self, incarnation: int, certificate: str, secret: bytes) -> Worker | None:
        """Returns the active worker of a process, or None. Incarnations are no secret: a process
        that repeats another one's incarnation is another worker."""
        return next(
            (
                worker
                for worker in self.workers.values()
                if worker.incarnation == incarnation
                and worker.state == "active"
                and worker.certificate == certificate
                and hmac.compare_digest(worker.secret, secret)
            ),
            None,
        )

    def worker_of(self, session: bytes, certificate: str, serial: str = "") -> str:
        """Returns the name of the worker with ``session`` and ``certificate``, and notes the serial
        number of that certificate; empty for an unknown session, such as a departed worker's."""
        name = self._sessions.get(session)
        worker = self.workers.get(name) if name is not None else None
        if worker is None or worker.certificate != certificate:
            return ""
        worker.serial = serial
        return worker.name

    def bar(self, worker: Worker) -> None:
        """Forbids the process of ``worker`` to register again."""
        self.barred[_digest(worker.secret)] = worker.name
        while len(self.barred) > BARRED:
            del self.barred[next(iter(self.barred))]

    def opened(self, worker: Worker, session: bytes) -> None:
        """Notes the session that ``worker`` calls with from now on."""
        worker.session = session
        self._sessions[session] = worker.name

    def worker_seen(self, name: str, now: float) -> bool:
        """Renews a worker's lease. False when it is unknown or counts as gone: it must register
        again, and gets another name."""
        worker = self.workers.get(name)
        if worker is None or worker.state != "active":
            return False
        worker.seen = now
        return True

    def worker(self, name: str) -> Worker:
        """Returns the worker that calls.

        Raises:
            StaleGeneration: it is unknown or counts as gone, and must register again.
        """
        worker = self.workers.get(name)
        if worker is None or worker.state == "left":
            raise StaleGeneration(f"{name or 'a worker without a session'} is not registered here")
        if worker.state != "active":
            raise StaleGeneration(f"{name} was silent for too long and was taken for gone")
        return worker

    def leave_worker(self, name: str) -> bool:
        """Marks a worker as left; returns whether it was active."""
        worker = self.workers.get(name)
        if worker is None or worker.state != "active":
            return False
        worker.state = "left"
        return True

    def tick(self, now: float) -> list[Effect]:
        """Returns the members that have fallen silent since the last tick.

        A tick that is more than half a lease late means that this process stood still, and all
        incoming heartbeats with it: then it renews every lease before judging any.
        """
        late = self._ticked is not None and now - self._ticked > self.lease_s / 2
        self._ticked = now
        if late:
            for shard in self.shards:
                shard.seen = now
            for worker in self.workers.values():
                worker.seen = now
                worker.stood(now)
            return []
        effects: list[Effect] = []
        for shard in self.shards:
            if shard.state in ("starting", "ready") and now - shard.seen > self.lease_s:
                shard.state = "silent"
                silence = f"{shard} has been silent for {now - shard.seen:.0f} s"
                effects.append(ShardSilent(shard.index, silence))
        for worker in self.workers.values():
            if worker.state == "active" and now - worker.seen > self.lease_s:
                worker.state = "silent"
                reason = f"{worker.name} has been silent for {now - worker.seen:.0f} s"
                effects.append(WorkerSilent(worker.name, reason))
        return effects

    def shards_there(self, now: float) -> int:
        """Counts the shards that are present or may come back shortly."""
        return sum(
            s.state in ("starting", "ready") and (s.watching or now - s.seen <= STARTING_S)
            for s in self.shards
        )

    def shards_hoped_for(self, now: float) -> int:
        """Counts those, and silent shards with an open command stream: a stopped process or a
        swapping machine still has its parameters."""
        stopped = sum(s.state == "silent" and s.watching for s in self.shards)
        return self.shards_there(now) + stopped

    @property
    def shard_away(self) -> bool:
        """Whether a shard is missing, silent or without its command stream, so that an operator may
        have to start it. A shard that starts or restores is present."""
        return any(
            s.state not in ("starting", "ready") or (s.ready and not s.watching)
            for s in self.shards
        )

    def waiting_for_shards(self) -> str:
        """Says which shards are missing, starting or silent, continuing "waiting for"; empty when
        all are present."""
        missing = [s.index for s in self.shards if s.state == "missing"]
        parts = [f"{shards(missing)} to register"] if missing else []
        # A shard that watches has started, and itself waits for the others.
        parts += [f"{s} to start" for s in self.shards if s.state == "starting" and not s.watching]
        parts += [f"a sign of life of {s}" for s in self.shards if s.state == "silent"]
        parts += [f"{s} to come back" for s in self.shards if s.state == "ready" and not s.watching]
        return "; ".join(parts)

    def _free(self, shard: Shard, now: float) -> bool:
        if shard.state in ("silent", "left"):
            return True
        if shard.watched:
            return not shard.watching
        return now - shard.seen > STARTING_S

    def _shard(self, index: int, incarnation: int) -> Shard:
        if not 0 <= index < len(self.shards):
            raise InvalidArgument(f"there is no shard {index} in a job of {len(self.shards)}")
        shard = self.shards[index]
        if shard.incarnation != incarnation:
            raise StaleGeneration(
                f"shard {index} is held by another process"
                if shard.incarnation or incarnation in self._former[index]
                else f"shard {index} has not registered here"
            )
        return shard

    def _shard_seen(self, shard: Shard, now: float) -> None:
        shard.seen = now
        if shard.state == "silent":
            shard.state = "ready" if shard.ready else "starting"


def _digest(secret: bytes) -> str:
    """Names a process by its secret without giving that away to readers of the ledger."""
    return hashlib.sha256(secret).hexdigest()


def known_members(
    shards: int,
    lease_s: float,
    held: Iterable[tuple[str, int]],
    named: Iterable[tuple[str, int]],
    barred: Mapping[str, str] | None = None,
) -> Membership:
    """Returns the members of a run from what an earlier coordinator stored: ``(member,
    incarnation)`` of the processes that ``held`` a shard's place and that were ``named`` as
    workers, oldest first, and :attr:`Membership.barred`."""
    places: dict[int, list[int]] = {}
    for member, incarnation in held:
        places.setdefault(int(member), []).append(incarnation)
    former = {shard: incarnations[:-1] for shard, incarnations in places.items()}
    last = {shard: incarnations[-1] for shard, incarnations in places.items()}
    names = {number: name for name, number in named}
    return Membership(shards, lease_s, former, names, last, barred)
