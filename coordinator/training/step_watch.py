"""Watches finished batches and steps for a job that goes wrong: NaN gradients, diverging losses."""

from __future__ import annotations

from coordinator.core.work import Report
from coordinator.records.curves import Curves
from coordinator.records.notes import JobWarnings, Notes
from coordinator.schedule.guard import Guard
from psrpc.core.policy import Policy


class StepWatch:
    """The watch over a run's steps, in all of its generations. Also draws them as a curve.
    ``failure`` says why the job must stop. Not thread-safe."""

    def __init__(
        self,
        policy: Policy,
        notes: Notes,
        curves: Curves,
        warnings: JobWarnings,
        attended: bool = False,
    ) -> None:
        """An ``attended`` job is only warned: its attendant sees the loss, and decides."""
        self.failure: str | None = None
        self._attended = attended
        self._warned: set[str] = set()
        self._guard = Guard(policy, notes.first_loss, attended)
        self._notes = notes
        self._curves = curves
        self._warnings = warnings

    @property
    def loss(self) -> float:
        """Mean loss of the last steps; NaN before the first."""
        return self._guard.loss

    def follow(self, policy: Policy) -> None:
        """Continues under ``policy``."""
        self._guard.follow(policy)

    def batch_done(self, worker: str, report: Report) -> None:
        """Notes a batch that ``worker`` has done: a step, or in sync mode a part of one."""
        if report.skipped:
            look = f"; look at the data: {report.not_finite}" if report.not_finite else ""
            self._warnings.add(
                f"{report.batch} were skipped: their gradient is NaN or infinite ({worker}){look}"
            )
        self._judge(self._guard.batch(report.batch, report.skipped, report.staleness))

    def step_done(self, step: int, loss: float, staleness: int) -> None:
        """Notes a finished step that changed the parameters."""
        self._curves.step(step, loss, staleness)
        self._judge(self._guard.step(loss))
        self._warnings.take(self._guard)
        self._notes.note_first_loss(self._guard.first_loss)

    def _judge(self, verdict: str | None) -> None:
        if verdict is None:
            return
        if not self._attended:
            self.failure = self.failure or verdict
            return
        code = verdict.partition(":")[0]
        if code not in self._warned:
            self._warned.add(code)
            self._warnings.add(verdict)
