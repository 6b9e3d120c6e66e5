"""The schedule of a ``fit``: the batches of a job that its epochs and steps correspond to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class FitSchedule:
    """The schedule of a ``fit``.

    Attributes:
        first: the first epoch, ``initial_epoch``.
        epochs: the epoch to stop before, as in ``fit``.
        job_epochs: epochs that the job can train.
        steps: updates of an epoch.
        per_step: batches of an update: K in sync mode, else 1.
        per_epoch: batches of an epoch.
        records: records of an epoch.
        every: updates from one batch hook to the next.
        validated: whether there is validation data.
        validation_freq: as in ``fit``.
    """

    first: int
    epochs: int
    job_epochs: int
    steps: int
    per_step: int
    per_epoch: int
    records: int
    every: int
    validated: bool
    validation_freq: int | Sequence[int] = 1

    @property
    def total(self) -> int:
        """Batches of the job."""
        return self.job_epochs * self.per_epoch

    def limit(self, epoch: int, step: int) -> int:
        """Returns the batches that are done after ``step`` updates of ``epoch``."""
        within = min(step * self.per_step, self.per_epoch)
        return (epoch - self.first) * self.per_epoch + within

    def begun_at(self, epoch: int | None) -> FitSchedule:
        """Returns the schedule from ``epoch`` on; None for that of the call."""
        return self if not epoch else replace(self, first=min(epoch, self.epochs))

    def validates(self, epoch: int) -> bool:
        """Whether the results of ``epoch`` contain those of the validation data."""
        if not self.validated:
            return False
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq
