"""What each worker should do now. Deterministic: it acts on its course alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.lifecycle import ENDED
from coordinator.work import Initialize, Wait, Work
from psrpc.logs import get_logger

if TYPE_CHECKING:
    from coordinator.course import Course

log = get_logger()


class Assignments:
    """Finds work by the phase of the job. ``initializer`` is who initializes the shards, None
    while nobody does. Not thread-safe."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self.initializer: str | None = None

    def begin(self) -> None:
        """A generation has begun."""
        self.initializer = None

    def find(self, name: str, received: int) -> Work:
        """What ``name`` should do now; ``received`` as in LeaseWork."""
        course = self._course
        if course.phase in ENDED:
            return course.end()
        reason, until = "", None
        broken = course.stuck.why_no_lease(name)
        if broken:
            return Wait(broken)
        if course.phase == "initializing" and not course.generations.formation.initialized:
            if self.initializer in (None, name):
                self.initializer = name
                return Initialize()
        elif course.phase in ("training", "finishing"):
            task = course.training.orders.evaluations.lease(name)
            if task is not None:
                course.training.idle_worker(name)
                # Those who waited for its clock need not.
                course.bell.ring()
                return task
            if course.phase == "training":
                active = course.members.active_workers
                work = course.training.lease(name, course.now(), received, active)
                if not isinstance(work, Wait):
                    return work
                reason, until = work.reason, work.until
        return Wait(course.waiting_for() or reason or "work", until)

    def release(self, name: str) -> None:
        """Every shard refuses ``name``: others get what it held."""
        opened = self._course.training.release(name)
        if self.initializer == name:
            self.initializer = None
        log.info("work is open again", of=name, batches=opened)
