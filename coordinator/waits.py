"""What a job waits for, in words, and how often that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.lifecycle import ENDED, FORMING
from psrpc.logs import get_logger
from psrpc.waiting import FIRST_S, Announcer

if TYPE_CHECKING:
    from coordinator.course import Course

log = get_logger()


def waiting_for(course: Course) -> str:
    """What the job waits for; empty while it goes on."""
    if course.phase in ENDED:
        return ""
    training = course.training
    orders = training.orders
    parts = [course.members.waiting_for_shards()]
    if course.phase in FORMING:
        parts.append(course.generations.waiting_for())
    elif course.stopping is not None:
        parts.append(course.stopping.waiting_for(training))
    elif not course.members.active_workers:
        parts.append("a worker to register")
    elif course.phase == "initializing":
        if not course.generations.formation.initialized:
            parts.append(f"{course.assignments.initializer or 'a worker'} to initialize the shards")
        parts.append(orders.snapshots.waiting_for())
    elif course.phase == "finishing":
        parts += [orders.snapshots.waiting_for(), orders.saving.waiting_for()]
        parts.append(orders.evaluations.waiting_for())
    elif course.changes.switch is not None:
        parts.append(course.changes.switch.waiting_for(training))
    else:
        parts.append(training.waiting_for())
    if course.phase not in FORMING:
        parts.append(course.stuck.waiting_for())
        parts.append(course.departures.waiting_for())
    return "; ".join(part for part in parts if part)


def held_up(course: Course) -> str:
    """Like :func:`waiting_for`, but empty while batches are being done: that every one is in
    somebody's hands is how it should be."""
    last = course.training.progress.last_done
    busy = last is not None and course.now() - last < FIRST_S
    if course.phase == "training" and busy:
        return course.members.waiting_for_shards()
    return waiting_for(course)


class Waits:
    """Says what is awaited, less and less often. Not thread-safe."""

    def __init__(self) -> None:
        self._announcer = Announcer(
            lambda reason, waited_s: log.info(
                "waiting", waiting_for=reason, waited_s=round(waited_s)
            )
        )

    def look(self, reason: str, now: float) -> None:
        """Call it now and then with what is awaited, or with nothing."""
        if reason:
            self._announcer.waiting(reason, now)
        else:
            self._announcer.over()

    def waited_s(self, now: float) -> float:
        """How long that has been awaited, in seconds; 0 when nothing is."""
        return self._announcer.waited_s(now)
