"""How a job stops or drains: what is under way is finished, and saved. Pure."""

from __future__ import annotations

from coordinator.core.wording import step_of
from coordinator.training.job_state import JobState
from coordinator.training.training import Training
from coordinator.transitions.save_request import SaveRequest
from psrpc.core.plural import counted

DRAINED = "drained by a signal: the run has not ended, and the same command goes on with it"

FINISH_S = 8.0
"""Time for the work that is leased."""

SAVE_S = 60.0
"""Time for the checkpoint after it."""


class Stopping:
    """Between the signal and the end. Not thread-safe."""

    def __init__(self, now: float, drains: bool = False) -> None:
        self.drains = drains
        """Whether the coordinator alone leaves, and another one goes on with the run."""
        self._finish_by = now + FINISH_S
        self._save_by = now + FINISH_S + SAVE_S
        self._save: SaveRequest | None = None

    def over(self, job: JobState, newest: str) -> bool:
        """Whether all is saved, or never will be, or it has taken too long, which is a warning.
        Call it at every change and tick while the job stops. ``newest`` is the checkpoint that was
        committed last, empty if there is none."""
        now, training = job.now(), job.training
        if job.members.shards_hoped_for(now) < job.run.plan.shards or not job.complete:
            return self._give_up(job, newest, "a shard is gone")
        if self._save is None:
            if not training.idle and now < self._finish_by:
                return False
            training.close()
            self._save = SaveRequest()
        if self._save.saved(training, now):
            return True
        if now < self._save_by:
            return False
        return self._give_up(
            job, newest, f"after {SAVE_S:.0f} s it waits for {self.waiting_for(training)}"
        )

    def _give_up(self, job: JobState, newest: str, why: str) -> bool:
        step = job.training.span.step
        lost = step - (step_of(newest) or 0)
        if lost > 0:
            steps = counted(lost, "step is", "steps are")
            who = "the coordinator leaves, and the" if self.drains else "the job stops, and its"
            job.warnings.add(
                f"{who} state of step {step} is not saved: {why}; a run that goes on without these "
                f"shards does so from {newest or 'its start'}: {steps} done again"
            )
        return True

    def waiting_for(self, training: Training) -> str:
        """In words."""
        if self._save is None:
            schedule = training.schedule
            return (schedule.waiting_for() if schedule else "") or "work that is under way"
        orders = training.orders
        saving = orders.snapshots.waiting_for() or orders.saving.waiting_for()
        return saving or orders.awaited_commit()
