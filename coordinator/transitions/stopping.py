"""Stops or drains a job: work in flight is finished, and saved. Pure."""

from __future__ import annotations

from coordinator.checkpoints.cadence import checkpoint_pause_s
from coordinator.core.lifecycle import ENDED_EARLY, STOPPED, Phase
from coordinator.core.wording import step_of
from coordinator.training.job_state import JobState
from coordinator.training.training import Training
from psrpc.core.text import counted

DRAINED = "drained by a signal: the run has not ended, and the same command goes on with it"
FINISH_S = 8.0
"""Seconds in which leased work may finish."""

SAVE_S = 60.0
"""Seconds for the checkpoint after that."""


class Stopping:
    """The time between the signal and the end. Not thread-safe."""

    def __init__(self, now: float, drains: bool = False, early: bool = False) -> None:
        self.drains = drains
        """Whether only the coordinator leaves, and another one continues the run."""
        self.end: tuple[str, Phase] = (ENDED_EARLY, "done") if early else (STOPPED, "failed")
        """Reason and phase of the job after that."""
        self._finish_by = now + FINISH_S
        self._begin_by = now + FINISH_S
        self._save_by = now + FINISH_S + SAVE_S
        self._save: SaveRequest | None = None

    def over(self, job: JobState, newest: str) -> bool:
        """Whether the stop is over: all is saved, or it cannot be or takes too long, which adds a
        warning. Call it at every change and tick while the job stops. ``newest`` is the checkpoint
        committed last, empty if there is none."""
        now, training = job.now(), job.training
        gone = job.members.places.hoped_for(now) < job.run.plan.shards
        if gone or not (job.complete or job.generations.again):
            return self._give_up(job, newest, "a shard is gone")
        if job.generations.again:
            if now < self._begin_by:
                return False
            return self._give_up(job, newest, "another generation does not begin")
        if self._save is None:
            if training.rounds is not None and training.rounds.ahead:
                self._begin_again(job, now)
                return False
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

    def _begin_again(self, job: JobState, now: float) -> None:
        """Has shards drop rounds that were decided ahead: some shards may have applied more of them
        than others, or than was reported."""
        self._begin_by = now + FINISH_S
        job.training.decisions.held = True
        job.generations.begin_again()
        for shard in range(job.run.plan.shards):
            job.streams.end(shard)

    def _give_up(self, job: JobState, newest: str, why: str) -> bool:
        step = job.training.span.step
        lost = step - (step_of(newest) or 0)
        if lost > 0:
            steps = counted(lost, "step is", "steps are")
            subject = "the coordinator leaves, and the" if self.drains else "the job stops, and its"
            job.warnings.add(
                f"{subject} state of step {step} is not saved: {why}; a run that goes on without "
                f"these shards does so from {newest or 'its start'}: {steps} done again"
            )
        return True

    def waiting_for(self, training: Training) -> str:
        """Names the event that the stop waits for."""
        if self._save is None:
            schedule = training.schedule
            return (schedule.waiting_for() if schedule else "") or "work that is under way"
        orders = training.orders
        saving = orders.snapshots.waiting_for() or orders.saving.final.waiting_for()
        return saving or orders.awaited_commit()


class SaveRequest:
    """A request for a checkpoint of the present training state or a later one, in one generation;
    once training is done, for the final one. A failed one is ordered again after a pause, for as
    long as its owner asks. Not thread-safe."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._failures = 0
        self._again_at = 0.0

    def saved(self, training: Training, now: float) -> bool:
        """Whether that state is on disk; orders it when due. Call it at every change and tick, or
        periodically."""
        orders = training.orders
        if self._number is None:
            if now < self._again_at:
                return False
            self._number = 0 if training.epochs.over else orders.request(training.span.step)
        training.order_due()
        if training.epochs.over:
            # The final checkpoint, if it failed, is ordered again without a request.
            return orders.saving.final.saved
        if orders.is_lost(self._number):
            self._number = None
            self._failures += 1
            self._again_at = now + checkpoint_pause_s(self._failures)
            return False
        return orders.is_saved(self._number)
