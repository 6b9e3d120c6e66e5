"""How a job stops that was told to: what is under way is finished, and saved. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.training import Training

if TYPE_CHECKING:
    from coordinator.course import Course

STOPPED = "stopped by a signal"

FINISH_S = 8.0
"""Time for the work that is leased."""

SAVE_S = 60.0
"""Time for the checkpoint after it."""


class Stopping:
    """Between the signal and the end. Not thread-safe."""

    def __init__(self, now: float) -> None:
        self._finish_by = now + FINISH_S
        self._save_by = now + FINISH_S + SAVE_S
        self._checkpoint: int | None = None

    def over(self, course: Course) -> bool:
        """Whether all is saved, or never will be, or it has taken too long. Call it at every
        change and tick while the job stops."""
        now, training = course.now(), course.training
        if course.members.shards_hoped_for(now) < course.run.plan.shards or not course.complete:
            return True
        if self._checkpoint is None:
            if not training.idle and now < self._finish_by:
                return False
            self._checkpoint = training.close()
        training.order_due()
        return training.is_saved(self._checkpoint) or now >= self._save_by

    def waiting_for(self, training: Training) -> str:
        """In words."""
        if self._checkpoint is None:
            schedule = training.schedule
            return (schedule.waiting_for() if schedule else "") or "work that is under way"
        orders = training.orders
        saving = orders.snapshots.waiting_for() or orders.saving.waiting_for()
        return saving or "a checkpoint to be committed"
