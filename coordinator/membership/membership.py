"""Who is there: shards by index, workers by id, each with an incarnation and signs of life.

Pure: time comes in, and nothing here locks; the engine's loop is the only caller.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from coordinator.core.figures import ShardFigures
from coordinator.core.wording import shards
from coordinator.membership.members import Shard, ShardSilent, Worker, WorkerSilent
from coordinator.membership.newcomers import gives_way
from psrpc.core.errors import (
    AccessDenied,
    AlreadyExists,
    InvalidArgument,
    ResourceExhausted,
    StaleGeneration,
)

LEASE_S = 10.0
"""Silence after which a shard or worker is taken for gone."""

STARTING_S = 3.0
"""Silence after which a shard that has no command stream is not counted on: three signs of life.
Before it has had one it holds nothing, and its place is free then."""

KEPT_WORKERS = 200
"""Workers that are gone and still remembered."""

MAX_ACTIVE = 1024
"""Workers at once: twice as many as a shard has room for (``psrpc.net.limits.CONVERSATIONS``),
since those that were killed count until their leases have lapsed. What is told of all of them fits
in a message."""

BARRED = 1000
"""Processes that are remembered to have been barred by an operator."""

FORMER = 100
"""Processes that are remembered to have held a shard's place before."""


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
        """What an earlier coordinator of the run knew: ``former`` incarnations of shards, by
        index, that were replaced, and the ``last`` one, which may still be there; ``names`` of
        workers, by incarnation, the newest last; the processes that are ``barred``."""
        self.shards = [Shard(index) for index in range(shards)]
        self.workers: dict[str, Worker] = {}
        self._sessions: dict[bytes, str] = {}
        self.barred = dict(barred or {})
        """Processes that may not register any more, the newest last: the name of the worker that
        each was, by the digest of its secret."""
        self.lease_s = lease_s
        """Silence after which a shard or worker is taken for gone."""
        self._ticked: float | None = None
        self._former = [list((former or {}).get(index, ())) for index in range(shards)]
        self._last = [(last or {}).get(index, 0) for index in range(shards)]
        self._names = dict(names or {})
        self._next_worker = 1 + max(
            (int(name.rpartition("-")[2]) for name in self._names.values()), default=-1
        )

    @property
    def active_workers(self) -> int:
        """Workers that are there."""
        return sum(w.state == "active" for w in self.workers.values())

    def register_shard(
        self, index: int, incarnation: int, address: str, host: str, pid: int, now: float
    ) -> bool:
        """A shard process takes its place; whether it is a new one. Repeating it is safe.

        A place is free when nobody has it, when its holder's command stream has ended, or when
        its holder has been silent for a lease.

        Raises:
            InvalidArgument: there is no such index.
            AlreadyExists: another process has the place; names it.
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
        """False for a process that is to register: nobody has its place, and it has not lost it
        to another."""
        if not 0 <= index < len(self.shards):
            return True
        return self.shards[index].incarnation != 0 or incarnation in self._former[index]

    def shard_ready(self, index: int, incarnation: int, version: int, now: float) -> None:
        """A shard has begun a generation, with this version. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        shard.ready, shard.seen, shard.state = True, now, "ready"
        shard.began_at, shard.earlier = version, None

    def shard_watches(self, index: int, incarnation: int, now: float) -> None:
        """A shard has opened its command stream. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        shard.watching = shard.watched = True
        self._shard_seen(shard, now)

    def shard_stopped_watching(self, index: int, incarnation: int) -> None:
        """A shard's newest command stream has ended."""
        if self.shards[index].incarnation == incarnation:
            self.shards[index].watching = False

    def shard_beat(self, index: int, incarnation: int, figures: ShardFigures, now: float) -> None:
        """A sign of life of a shard. Raises StaleGeneration."""
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
        """A shard called, which is a sign of life too. Raises StaleGeneration."""
        shard = self._shard(index, incarnation)
        self._shard_seen(shard, now)
        return shard

    def shard_left(self, index: int, incarnation: int) -> None:
        """A shard has been told that the job is over."""
        if self.shards[index].incarnation == incarnation:
            self.shards[index].state = "left"

    def displaced_by(
        self, incarnation: int, address: str, certificate: str = "", secret: bytes = b""
    ) -> Worker | None:
        """The worker that has to go before a process from ``address`` registers; see
        :func:`coordinator.membership.newcomers.gives_way`."""
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
        """A worker gets an id; the same one again if it repeats itself and is not gone.

        Args:
            certificate: the common name of the certificate that it calls with.
            secret: what only this process knows.
            address: where it calls from, without the port.

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
                # That it joins anew mends no route; it says when one is whole.
                worker.unreachable = dict(earlier.unreachable)
                worker.generation = earlier.generation
        self.workers[name] = worker
        gone = [w.name for w in self.workers.values() if w.state != "active"]
        for old in gone[: max(0, len(gone) - KEPT_WORKERS)]:
            self._sessions.pop(self.workers.pop(old).session, None)
        return worker

    def active_worker(self, incarnation: int, certificate: str, secret: bytes) -> Worker | None:
        """The worker that a process is, if it has registered and is not gone. Incarnations are no
        secret: another process that names this one's is another worker."""
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
        """The name of the worker that has ``session`` and calls with ``certificate``, now the one
        with this serial number; empty for a session that is not known here, such as that of a
        worker that has left."""
        name = self._sessions.get(session)
        worker = self.workers.get(name) if name is not None else None
        if worker is None or worker.certificate != certificate:
            return ""
        worker.serial = serial
        return worker.name

    def bar(self, worker: Worker) -> None:
        """The process of ``worker`` may not register again."""
        self.barred[_digest(worker.secret)] = worker.name
        while len(self.barred) > BARRED:
            del self.barred[next(iter(self.barred))]

    def opened(self, worker: Worker, session: bytes) -> None:
        """``worker`` calls with ``session`` from now on."""
        worker.session = session
        self._sessions[session] = worker.name

    def worker_seen(self, name: str, now: float) -> bool:
        """A sign of life of a worker. False when it is not known, or is taken for gone: it must
        register again, and gets another name."""
        worker = self.workers.get(name)
        if worker is None or worker.state != "active":
            return False
        worker.seen = now
        return True

    def worker(self, name: str) -> Worker:
        """The worker that calls.

        Raises:
            StaleGeneration: the coordinator does not know it, or has taken it for gone: register
                again.
        """
        worker = self.workers.get(name)
        if worker is None or worker.state == "left":
            raise StaleGeneration(f"{name or 'a worker without a session'} is not registered here")
        if worker.state != "active":
            raise StaleGeneration(f"{name} was silent for too long and was taken for gone")
        return worker

    def leave_worker(self, name: str) -> bool:
        """A worker goes; whether it was there."""
        worker = self.workers.get(name)
        if worker is None or worker.state != "active":
            return False
        worker.state = "left"
        return True

    def tick(self, now: float) -> list[Effect]:
        """Who has fallen silent since the last tick.

        A tick that comes more than half a lease late means that this process stood still, and
        with it every sign of life on its way in: all leases are renewed before any is judged.
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
        """Shards that are there, or may come back in a moment."""
        return sum(
            s.state in ("starting", "ready") and (s.watching or now - s.seen <= STARTING_S)
            for s in self.shards
        )

    def shards_hoped_for(self, now: float) -> int:
        """Those, and shards that are silent, but whose command stream stands: a process that is
        stopped, or a machine that swaps, still has what it held."""
        stopped = sum(s.state == "silent" and s.watching for s in self.shards)
        return self.shards_there(now) + stopped

    @property
    def shard_away(self) -> bool:
        """Whether a shard is missing or silent, or has lost its command stream: somebody may have
        to start it. One that starts, or restores, is there."""
        return any(
            s.state not in ("starting", "ready") or (s.ready and not s.watching)
            for s in self.shards
        )

    def waiting_for_shards(self) -> str:
        """Which shards are missing, starting or silent, in words that go on from "waiting for";
        empty when all are there."""
        missing = [s.index for s in self.shards if s.state == "missing"]
        parts = [f"{shards(missing)} to register"] if missing else []
        # One that watches has started, and waits for the others itself.
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
    """The members of a run, with what an earlier coordinator has stored: ``(member, incarnation)``
    of the processes that ``held`` a shard's place and that were ``named`` as workers, oldest
    first, and those that are ``barred``, see :attr:`Membership.barred`."""
    places: dict[int, list[int]] = {}
    for member, incarnation in held:
        places.setdefault(int(member), []).append(incarnation)
    former = {shard: incarnations[:-1] for shard, incarnations in places.items()}
    last = {shard: incarnations[-1] for shard, incarnations in places.items()}
    names = {number: name for name, number in named}
    return Membership(shards, lease_s, former, names, last, barred)
