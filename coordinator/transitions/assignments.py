"""Finds work for a worker, by the phase of the job."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.core.lifecycle import ENDED
from coordinator.core.work import InitializationWork, Wait, Work
from coordinator.training.job_state import JobState
from coordinator.transitions.stuck import Stuck


class Assignments:
    """Finds work by the phase of the job. Not thread-safe."""

    def __init__(self, job: JobState, stuck: Stuck, waiting_for: Callable[[], str]) -> None:
        self._job = job
        self._stuck = stuck
        self._waiting_for = waiting_for

    def find(self, name: str, received: int) -> Work:
        """Returns the work of ``name`` now; ``received`` as in LeaseWork."""
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
            task = job.training.orders.evaluations.lease(name)
            if task is not None:
                job.training.idle_worker(name)
                # Workers that waited for its clock need not any more.
                job.bell.ring()
                return task
            if job.phase == "training":
                active = job.members.active_workers
                work = job.training.lease(name, job.now(), received, active)
                if not isinstance(work, Wait):
                    return work
                reason, until = work.reason, work.until
        return Wait(self._waiting_for() or reason or "work", until)
