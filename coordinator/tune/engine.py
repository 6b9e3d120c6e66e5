"""The engine of a study: starts trials, reports their evaluations, ends them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from coordinator.search.points import Point
from coordinator.search.trials import (
    AwaitTrials,
    BeginTrial,
    EndStudy,
    GoOnWith,
    StudyCounts,
    StudyLimits,
    StudyMetric,
    TrialEnd,
    TrialRecord,
    TrialValue,
    next_step,
)
from coordinator.tune.directory import StudyDirectory
from coordinator.tune.optuna_study import OptunaStudy
from coordinator.tune.trial_run import RunEnd, TrialHistory, TrialRun
from psrpc.core.text import counted, sanitize
from psrpc.ops.exit_status import DONE, INTERRUPTED

POLL_S = 0.1
"""Longest delay before the engine notices an evaluation, or the end of a run."""

REASON_CHARS = 300
"""Longest reason why a trial failed."""


@dataclass
class RunningTrial:
    """A trial that runs now.

    Attributes:
        number: the number of the trial.
        slot: its place among the trials that run at the same time, from 0; decides its GPU.
        began: monotonic seconds.
        judged: whether the storage has a verdict for it, so that its run is being ended.
        values: the values of the metric that were reported.
    """

    number: int
    slot: int
    point: Point
    run: TrialRun
    history: TrialHistory
    began: float
    judged: bool = False
    values: Sequence[TrialValue] = ()


class StudyScreen(Protocol):
    """A display of a study. Call :meth:`close` before anything else is printed."""

    def begun(self, trial: RunningTrial, went_on: bool) -> None: ...

    def evaluated(self, number: int, value: TrialValue) -> None: ...

    def ended(self, record: TrialRecord) -> None: ...

    def show(self, records: Sequence[TrialRecord], running: Sequence[RunningTrial]) -> None: ...

    def note(self, line: str) -> None: ...

    def close(self, records: Sequence[TrialRecord]) -> None: ...


Launcher = Callable[[int, Point, int], tuple[TrialRun, Path]]
"""Makes the run of a trial from its number, point and slot; returns it and its run directory."""


LauncherOf = Callable[[StudyDirectory, Callable[[str], object]], Launcher]
"""Makes the launcher of a study's trials, from its directory and what shows a line to the user.
Raises PsError or OSError."""


class StudyEngine:
    """Runs the trials of a study. Use it once, from one thread; :meth:`stop` is thread-safe."""

    def __init__(
        self,
        study: OptunaStudy,
        limits: StudyLimits,
        metric: StudyMetric,
        launcher: Launcher,
        screen: StudyScreen,
        changed: Callable[[Sequence[TrialRecord]], object],
        timeout_s: float | None = None,
    ) -> None:
        """``changed`` gets all trials whenever one has ended, and at the end of the study."""
        self._study = study
        self._limits = limits
        self._metric = metric
        self._launcher = launcher
        self._screen = screen
        self._changed = changed
        self._until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._running: list[RunningTrial] = []
        self._left: list[int] = []
        self._stop_requests = 0
        self._ending = False
        self._wake = threading.Event()

    def stop(self) -> None:
        """Ends the study and its runs, with checkpoints; a second call kills."""
        self._stop_requests += 1
        self._wake.set()

    def records(self) -> list[TrialRecord]:
        """Returns all trials of the study by number."""
        return self._study.records()

    def run(self) -> tuple[int, str]:
        """Blocks until the study has ended; returns the exit status and the reason.

        Raises:
            OSError: the journal cannot be written.
        """
        records = self._study.records()
        self._left = [each.number for each in records if each.phase == "running"]
        try:
            status, reason = self._go()
            self._stop_all()
        finally:
            records = self._records()
            self._screen.close(records)
            self._changed(records)
        return status, reason

    def _records(self) -> list[TrialRecord]:
        """Returns all trials; those under way that do not run now are ``stopped``."""
        running = {each.number for each in self._running}
        return [
            replace(each, phase="stopped")
            if each.phase == "running" and each.number not in running
            else each
            for each in self._study.records()
        ]

    def _go(self) -> tuple[int, str]:
        while True:
            self._look()
            if self._stop_requests:
                return INTERRUPTED, "stopped; the same command goes on with the study"
            step = next_step(self._limits, self._counts(), time.monotonic() > self._until)
            match step:
                case EndStudy():
                    return int(step.failed), step.reason
                case GoOnWith():
                    self._left.remove(step.number)
                    self._start(self._study.take_up(step.number), went_on=True)
                case BeginTrial():
                    self._start(self._study.ask(), went_on=False)
                case AwaitTrials():
                    self._screen.show(self._records(), self._running)
                    self._wake.wait(POLL_S)

    def _counts(self) -> StudyCounts:
        records = self._study.records()
        failed = sum(each.phase == "failed" for each in records)
        complete = sum(each.phase == "complete" for each in records)
        return StudyCounts(len(records), failed, tuple(self._left), len(self._running), complete)

    def _start(self, record: TrialRecord, went_on: bool) -> None:
        taken = {each.slot for each in self._running}
        slot = next(each for each in range(self._limits.parallel) if each not in taken)
        run, run_dir = self._launcher(record.number, record.point, slot)
        history = TrialHistory(run_dir, self._metric.name)
        trial = RunningTrial(record.number, slot, record.point, run, history, time.monotonic())
        trial.values = record.values
        if record.verdict:
            # An earlier command was killed between the verdict and the end.
            self._tell(trial, record)
            return
        self._running.append(trial)
        self._screen.begun(trial, went_on)
        run.start()

    # -- what trials do ----------------------------------------------------------------------

    def _look(self) -> None:
        for trial in list(self._running):
            end = trial.run.look()
            self._read(trial)
            if end is not None:
                self._running.remove(trial)
                self._ended(trial, end)

    def _read(self, trial: RunningTrial) -> None:
        """Reports new evaluations; ends the run of a trial that diverged or is pruned."""
        values = trial.history.values()
        if trial.judged or len(values) == len(trial.values):
            return
        # An epoch that is repeated after a recovery keeps the value that was reported first.
        for value in values:
            if value in trial.values:
                continue
            if not math.isfinite(value.value):
                self._judge(
                    trial,
                    "failed",
                    f"it has diverged: {self._metric.name} or loss is not finite after epoch "
                    f"{value.epoch}",
                )
                break
            self._screen.evaluated(trial.number, value)
            if self._study.report(trial.number, value):
                self._judge(trial, "pruned", f"after epoch {value.epoch}")
                break
        trial.values = list(values)

    def _judge(self, trial: RunningTrial, verdict: TrialEnd, reason: str) -> None:
        self._study.give_verdict(trial.number, verdict, reason)
        trial.judged = True
        if verdict == "pruned":
            trial.run.end_early()
        else:
            trial.run.stop()

    def _ended(self, trial: RunningTrial, end: RunEnd) -> None:
        self._study.ran(trial.number, time.monotonic() - trial.began)
        if trial.judged:
            self._tell(trial, self._study.records()[trial.number])
        elif end.status == DONE and trial.values:
            self._tell_end(trial, "complete", trial.values[-1].value)
        elif end.status == DONE:
            reason = f"its run has no evaluation with {self._metric.name}"
            self._tell_end(trial, "failed", reason=reason)
        elif end.status != INTERRUPTED:
            self._tell_end(trial, "failed", reason=sanitize(end.reason, REASON_CHARS))
        elif not self._ending:
            # The processes of the trial got a stop signal, but this process did not.
            self.stop()

    def _tell(self, trial: RunningTrial, record: TrialRecord) -> None:
        end: TrialEnd = "pruned" if record.verdict == "pruned" else "failed"
        self._tell_end(trial, end, reason=record.reason)

    def _tell_end(
        self, trial: RunningTrial, end: TrialEnd, value: float | None = None, reason: str = ""
    ) -> None:
        self._study.tell(trial.number, end, value, reason)
        records = self._records()
        self._screen.ended(records[trial.number])
        self._changed(records)

    def _stop_all(self) -> None:
        """Stops trials that still run; the storage keeps them as running, so that the same command
        goes on with them."""
        self._ending = True
        if self._running:
            saves = counted(len(self._running), "trial")
            self._screen.note(f"waiting for {saves} to save; Ctrl-C again ends at once")
        for trial in self._running:
            trial.run.stop()
        killed = False
        while self._running:
            self._wake.clear()
            self._look()
            if self._stop_requests > 1 and not killed:
                killed = True
                self._screen.note("ending at once; what is not saved is trained again")
                for trial in self._running:
                    trial.run.stop()
            self._screen.show(self._records(), self._running)
            self._wake.wait(POLL_S)
