"""Shows a study on a console: as a table that is redrawn on a terminal, as lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.core.wording import duration, figure
from coordinator.search.points import Point, overrides_of
from coordinator.search.trials import (
    StudyLimits,
    StudyMetric,
    TrialRecord,
    TrialValue,
    best_trial,
)
from coordinator.tune.engine import RunningTrial, StudyScreen
from psrpc.core.text import sanitize

SHOWN = 5
"""Number of best trials in the table on a terminal."""

DRAW_S = 0.5
"""Pause before the table is drawn anew."""


def headline(records: Sequence[TrialRecord], metric: StudyMetric, limits: StudyLimits) -> str:
    """Returns counts, the best value so far and the time left, in one line."""
    phases = Counter(each.phase for each in records)
    ended = len(records) - phases["running"] - phases["stopped"]
    words = [f"{ended} of {limits.trials} trials"]
    words += [
        f"{phases[name]} {name}"
        for name in ("running", "stopped", "pruned", "failed")
        if phases[name]
    ]
    best = best_trial(records, metric)
    if best is not None and best.value is not None:
        words.append(f"best {metric.name} {figure(best.value)} in trial {best.number}")
    if left := time_left_s(records, limits):
        words.append(f"about {duration(left)} left")
    return ", ".join(words)


def time_left_s(records: Sequence[TrialRecord], limits: StudyLimits) -> float | None:
    """Returns the time for the remaining trials in seconds, if they take as long as those that have
    ended; None if none has ended, or none remains."""
    ended = (each for each in records if each.phase not in ("running", "stopped"))
    took = [each.seconds for each in ended if each.seconds is not None]
    left = limits.trials - len(took)
    return sum(took) / len(took) * left / limits.parallel if took and left > 0 else None


def settings_words(point: Point) -> str:
    """Formats a point: ``optimizer.learning_rate=0.01, batch_size=32``, with four digits."""
    short = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in point.items()}
    return sanitize(", ".join(overrides_of(short)))


class _Screen:
    def __init__(self, console: Console, metric: StudyMetric, limits: StudyLimits) -> None:
        self._console = console
        self._metric = metric
        self._limits = limits
        self._began = time.monotonic()

    def note(self, line: str) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`. Thread-safe."""
        stamp = f"[{duration(time.monotonic() - self._began):>7}]"
        self._console.print(Text(f"{stamp} {sanitize(line)}"), soft_wrap=True)

    def ended(self, record: TrialRecord) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        value = "" if record.value is None else f", {self._metric.name} {figure(record.value)}"
        why = f": {record.reason}" if record.reason else ""
        self.note(f"trial {record.number} is {record.phase}{value}{why}")

    def _head(self, records: Sequence[TrialRecord]) -> str:
        return headline(records, self._metric, self._limits)


class StudyLines(_Screen):
    """A line for every event, with the seconds since the start."""

    _said = ""

    def begun(self, trial: RunningTrial, went_on: bool) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        verb = "goes on" if went_on else "begins"
        self.note(f"trial {trial.number} {verb}: {settings_words(trial.point)}")

    def evaluated(self, number: int, value: TrialValue) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        self.note(f"trial {number} epoch {value.epoch}: {self._metric.name} {figure(value.value)}")

    def show(self, records: Sequence[TrialRecord], running: Sequence[RunningTrial]) -> None:  # noqa: ARG002
        """See :class:`coordinator.tune.engine.StudyScreen`: a line when a trial has ended."""
        ended = sum(each.phase not in ("running", "stopped") for each in records)
        if ended and str(ended) != self._said:
            self._said = str(ended)
            self.note(self._head(records))

    def close(self, records: Sequence[TrialRecord]) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""


class StudyTable(_Screen):
    """A redrawn table of the running trials and the best ones; events scroll above it."""

    def __init__(self, console: Console, metric: StudyMetric, limits: StudyLimits) -> None:
        super().__init__(console, metric, limits)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = -DRAW_S

    def begun(self, trial: RunningTrial, went_on: bool) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`: the table shows it."""

    def evaluated(self, number: int, value: TrialValue) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`: the table shows it."""

    def show(self, records: Sequence[TrialRecord], running: Sequence[RunningTrial]) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        now = time.monotonic()
        if now - self._drawn < DRAW_S:
            return
        self._drawn = now
        self._live.start()
        self._live.update(self._table(records, running, now), refresh=True)

    def _table(
        self, records: Sequence[TrialRecord], running: Sequence[RunningTrial], now: float
    ) -> Group:
        table = Table("trial", "state", "epoch", self._metric.name, "seconds", "settings")
        for trial in running:
            status = trial.run.status
            value = figure(trial.values[-1].value) if trial.values else ""
            # Trials on an engine have no status, but evaluations.
            seen = str(trial.values[-1].epoch) if trial.values else ""
            epoch = f"{status.epoch}/{status.epochs}" if status.epochs else seen
            state = "ends" if trial.judged else status.phase or ("trains" if seen else "starts")
            took = f"{now - trial.began:.0f}"
            settings = settings_words(trial.point)
            table.add_row(str(trial.number), state, epoch, value, took, settings)
        done = [each for each in records if each.phase == "complete" and each.value is not None]
        done.sort(key=lambda each: each.value or 0.0, reverse=self._metric.direction == "max")
        for each in done[:SHOWN]:
            epoch = str(each.values[-1].epoch) if each.values else ""
            seconds = f"{each.seconds or 0:.0f}"
            value = figure(each.value or 0.0)
            settings = settings_words(each.point)
            table.add_row(str(each.number), each.phase, epoch, value, seconds, settings)
        return Group(Text(self._head(records)), table)

    def close(self, records: Sequence[TrialRecord]) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`: the best trials stay."""
        self._live.stop()
        self._console.print(self._table(records, (), time.monotonic()))


def open_study_screen(console: Console, metric: StudyMetric, limits: StudyLimits) -> StudyScreen:
    """Returns the screen that suits ``console``."""
    kind = StudyTable if console.is_terminal else StudyLines
    return kind(console, metric, limits)
