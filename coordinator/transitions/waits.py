"""Finds work for a worker, and logs the reason for which a job waits, less and less often."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.core.lifecycle import ENDED, FORMING
from coordinator.core.work import InitializationWork, Wait, Work
from coordinator.training.job_state import JobState
from coordinator.transitions.changes import Changes
from coordinator.transitions.departures import Departures
from coordinator.transitions.holding import Holding
from coordinator.transitions.stopping import Stopping
from coordinator.transitions.stuck import Stuck
from psrpc.ops.logs import get_logger
from psrpc.ops.retry import FIRST_S, Announcer


class Assignments:
    """Finds work by the phase of the job. Not thread-safe."""

    def __init__(self, job: JobState, stuck: Stuck, waiting_for: Callable[[], str]) -> None:
        self._job = job
        self._stuck = stuck
        self._waiting_for = waiting_for

    def find(
        self,
        name: str,
        received: int,
        ahead: bool = False,
        clocks: bool = False,
        devices: int = 1,
    ) -> Work:
        """Returns the work of ``name`` now; ``received``, ``clocks`` and ``devices`` as in
        LeaseWork, ``ahead`` its ``rounds_ahead``."""
        job = self._job
        if job.phase in ENDED:
            return job.end()
        reason, until = "", None
        broken = self._stuck.why_no_lease(name)
        if broken:
            return Wait(broken)
        if job.phase == "initializing" and not job.generations.formation.initialized:
            if job.initializer in (None, name):
                job.initializer = name
                return InitializationWork()
        elif job.phase in ("training", "finishing"):
            rounds = job.training.rounds
            # An evaluation would keep the round's other workers waiting for this worker's
            # micro-batch.
            held = rounds is not None and rounds.holds(name)
            task = None if held else job.training.orders.evaluations.lease(name)
            if task is not None:
                job.training.idle_worker(name)
                # Workers that waited for its clock need not any more.
                job.bell.ring()
                return task
            if job.phase == "training":
                active = job.members.active_workers
                can = ahead, clocks, devices
                work = job.training.lease(name, job.now(), received, active, *can)
                if not isinstance(work, Wait):
                    return work
                reason, until = work.reason, work.until
        return Wait(self._waiting_for() or reason or "work", until)


log = get_logger()


def waiting_for(
    job: JobState,
    stopping: Stopping | None,
    changes: Changes,
    holding: Holding,
    stuck: Stuck,
    departures: Departures,
) -> str:
    """Names the events that the job waits for; empty while it waits for none."""
    if job.phase in ENDED:
        return ""
    training = job.training
    orders = training.orders
    parts, held = [job.members.places.waiting_for()], holding.waiting_for()
    if job.phase in FORMING:
        parts.append(job.generations.waiting_for())
    elif stopping is not None:
        parts.append(stopping.waiting_for(training))
    elif held:
        parts.append(held)
    elif not job.members.active_workers:
        parts.append("a worker to register")
    elif job.phase == "initializing":
        if not job.generations.formation.initialized:
            parts.append(f"{job.initializer or 'a worker'} to initialize the shards")
        parts.append(orders.snapshots.waiting_for())
    elif job.phase == "finishing":
        parts += [orders.snapshots.waiting_for(), orders.saving.final.waiting_for()]
        parts.append(orders.evaluations.waiting_for())
    elif changes.switch is not None:
        parts.append(changes.switch.waiting_for(training))
    else:
        parts.append(training.waiting_for())
    if job.phase not in FORMING:
        parts.append(stuck.waiting_for())
        parts.append(departures.waiting_for())
    return "; ".join(part for part in parts if part)


def held_up(job: JobState, awaited: str) -> str:
    """Returns ``awaited``, or only the shards that are away while batches are being done: it is
    then normal that some work waits for workers that hold every batch."""
    last = job.training.progress.last_done
    busy = last is not None and job.now() - last < FIRST_S
    if job.phase == "training" and busy:
        return job.members.places.waiting_for()
    return awaited


class JobWaits:
    """Logs the reason for which the job waits, less and less often. Not thread-safe."""

    def __init__(self) -> None:
        self._announcer = Announcer(
            lambda reason, waited_s: log.info(
                "waiting", waiting_for=reason, waited_s=round(waited_s)
            )
        )

    def look(self, reason: str, now: float) -> None:
        """Takes the present ``reason`` to wait, empty for none. Call it periodically."""
        if reason:
            self._announcer.waiting(reason, now)
        else:
            self._announcer.over()

    def waited_s(self, now: float) -> float:
        """Returns how long the job has waited for it, in seconds; 0 if it waits for nothing."""
        return self._announcer.waited_s(now)
