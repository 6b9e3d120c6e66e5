"""The members of a run: shards by index and workers by name, each with incarnation and lease.

Pure: time is passed in, and nothing locks; the engine's loop is the only caller.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from coordinator.membership.members import ShardSilent, Worker, WorkerSilent, gives_way
from coordinator.membership.shard_places import ShardPlaces
from psrpc.core.errors import AccessDenied, ResourceExhausted, StaleGeneration

LEASE_S = 10.0
"""Silence in seconds after which a shard or worker counts as gone. Two heartbeats that time out and
the wait for a third fit in it, so a member that is alive is not taken for gone: a test compares it
with ``HEARTBEAT_S`` and the deadline of the call. Only the coordinator knows it."""

CROWD = 250
"""Number of workers up to which each sends heartbeats at the usual rate. Those that register beyond
it send them less often, down to half the rate: otherwise heartbeats alone would take a third of a
core."""

CALMEST = 2.0

KEPT_WORKERS = 200
"""Departed workers that are still remembered."""

MAX_ACTIVE = 1024
"""Concurrent workers: twice as many as a shard has room for (``psrpc.net.limits.CONVERSATIONS``),
since killed ones count until their leases lapse. The status of all of them fits in a message."""

BARRED = 1000
"""Processes barred by an operator that are remembered."""

Effect: TypeAlias = ShardSilent | WorkerSilent


class Membership:
    """The ``places`` of shards and any number of workers. Not thread-safe."""

    def __init__(
        self,
        places: ShardPlaces,
        lease_s: float,
        names: Mapping[int, str] | None = None,
        barred: Mapping[str, str] | None = None,
    ) -> None:
        """``names`` of workers by incarnation, the newest last, and ``barred`` processes are as an
        earlier coordinator of the run stored them."""
        self.places = places
        self.workers: dict[str, Worker] = {}
        self.active_workers = 0
        """Number of active workers."""
        self.joined_workers = 0
        """Number of workers that have registered, the departed ones too."""
        self._sessions: dict[bytes, str] = {}
        self._processes: dict[int, list[Worker]] = {}
        """The workers that are remembered, by incarnation."""
        self.barred = dict(barred or {})
        """Worker names of processes that may not register again, by the digest of their secret, the
        newest last."""
        self.lease_s = lease_s
        self._ticked: float | None = None
        self._names = dict(names or {})
        self._next_worker = 1 + max(
            (int(name.rpartition("-")[2]) for name in self._names.values()), default=-1
        )

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
        """Registers a worker; a process that repeats the call while it is active gets the same one.

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
        if self.active_workers >= MAX_ACTIVE:
            raise ResourceExhausted(
                f"this job has {MAX_ACTIVE} workers, as many as it can have; one that was killed "
                "counts until its lease has lapsed"
            )
        name = self._names.pop(incarnation, "")
        stored = bool(name)
        if not name:
            name = f"worker-{self._next_worker}"
            self._next_worker += 1
        worker = Worker(
            name, incarnation, host, pid, device, "active", certificate, secret, seen=now
        )
        worker.address, worker.registered, worker.stored = address, now, stored
        worker.calm = min(CALMEST, max(1.0, self.active_workers / CROWD))
        for earlier in self._processes.get(incarnation, ()):
            # Registering again repairs no route; the worker reports once a shard is reachable.
            worker.unreachable = dict(earlier.unreachable)
            worker.generation = earlier.generation
        self.workers[name] = worker
        self._processes.setdefault(incarnation, []).append(worker)
        self.active_workers += 1
        self.joined_workers += 1
        gone = [w.name for w in self.workers.values() if w.state != "active"]
        for old in gone[: max(0, len(gone) - KEPT_WORKERS)]:
            forgotten = self.workers.pop(old)
            self._sessions.pop(forgotten.session, None)
            self._processes[forgotten.incarnation].remove(forgotten)
            if not self._processes[forgotten.incarnation]:
                del self._processes[forgotten.incarnation]
        return worker

    def active_worker(self, incarnation: int, certificate: str, secret: bytes) -> Worker | None:
        """Returns the active worker of a process, or None. Incarnations are no secret: a process
        that repeats another one's incarnation is another worker."""
        return next(
            (
                worker
                for worker in self._processes.get(incarnation, ())
                if worker.state == "active"
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

    def allowed_s(self, worker: Worker) -> float:
        """Returns the silence in seconds after which ``worker`` counts as gone. Three tenths of
        :data:`LEASE_S` are pauses between heartbeats, which ``calm`` lengthens; the rest are
        deadlines of calls, which it does not."""
        return self.lease_s * (1 + 0.3 * (worker.calm - 1))

    def leave_worker(self, name: str) -> bool:
        """Marks a worker as left; returns whether it was active."""
        worker = self.workers.get(name)
        if worker is None or worker.state != "active":
            return False
        worker.state = "left"
        self.active_workers -= 1
        return True

    def tick(self, now: float) -> list[Effect]:
        """Returns the members that have fallen silent since the last tick.

        A tick that is more than half a lease late means that this process was suspended and
        received no heartbeats: such a tick renews every lease, and judges no member.
        """
        late = self._ticked is not None and now - self._ticked > self.lease_s / 2
        self._ticked = now
        if late:
            self.places.renew_all(now)
            for worker in self.workers.values():
                worker.seen = now
                worker.stood(now)
            return []
        effects: list[Effect] = [*self.places.fallen_silent(now, self.lease_s)]
        for worker in self.workers.values():
            if worker.state == "active" and now - worker.seen > self.allowed_s(worker):
                worker.state = "silent"
                self.active_workers -= 1
                reason = f"{worker.name} has been silent for {now - worker.seen:.0f} s"
                effects.append(WorkerSilent(worker.name, reason))
        return effects


def _digest(secret: bytes) -> str:
    """Returns an identifier of a process that does not give its secret away to readers of the
    ledger."""
    return hashlib.sha256(secret).hexdigest()


def known_members(
    shards: int,
    lease_s: float,
    held: Iterable[tuple[str, int]],
    named: Iterable[tuple[str, int]],
    barred: Mapping[str, str] | None = None,
) -> Membership:
    """Returns the members of a run as an earlier coordinator stored them. ``held`` and ``named``
    are the ``(member, incarnation)`` of the processes that had a shard's place and of those that
    were workers, oldest first; for ``barred`` see :attr:`Membership.barred`."""
    holders: dict[int, list[int]] = {}
    for member, incarnation in held:
        holders.setdefault(int(member), []).append(incarnation)
    former = {shard: incarnations[:-1] for shard, incarnations in holders.items()}
    last = {shard: incarnations[-1] for shard, incarnations in holders.items()}
    names = {number: name for name, number in named}
    return Membership(ShardPlaces(shards, former, last), lease_s, names, barred)
