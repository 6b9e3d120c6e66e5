"""The page of a study on the dashboard: the data that browsers get."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.dashboard.site import Site
from coordinator.dashboard.snapshots import PAGE, Subscribers
from coordinator.search.points import Space
from coordinator.search.space import RealRange, WholeRange
from coordinator.search.trials import StudyLimits, StudyMetric, TrialValue
from coordinator.tune.engine import RunningTrial, StudyScreen
from coordinator.tune.optuna_study import IMPORTANCE_TRIALS, TrialRecord
from coordinator.tune.results import best_trial
from coordinator.tune.screen import headline
from psrpc.core.text import sanitize


class StudyPage:
    """Holds the newest state of a study for browsers. Thread-safe."""

    def __init__(self, path: Path, metric: StudyMetric, limits: StudyLimits, space: Space) -> None:
        self._path = path
        self._metric = metric
        self._limits = limits
        self._axes = [axis(key, each) for key, each in space.ranges.items()]
        self._lock = threading.Lock()
        self._records: Sequence[TrialRecord] = ()
        self._running: Sequence[RunningTrial] = ()
        self._importance: Mapping[str, float] = {}
        self._ended = ""
        self.subscribers = Subscribers(time.monotonic)
        self.site = Site("study.html", {"/study.json": self.study})

    def show(self, records: Sequence[TrialRecord], running: Sequence[RunningTrial]) -> None:
        """Stores all trials of the study, and those that run."""
        with self._lock:
            self._records, self._running = records, tuple(running)

    def show_importance(self, importance: Mapping[str, float]) -> None:
        """Stores what :meth:`coordinator.tune.optuna_study.OptunaStudy.importance` returns."""
        with self._lock:
            self._importance = importance

    def end(self, reason: str, records: Sequence[TrialRecord]) -> None:
        """Stores why the study has ended, and its last state."""
        self.show(records, ())
        with self._lock:
            self._ended = sanitize(reason)
        self.subscribers.changed()

    def study(self) -> dict[str, Any]:
        """Returns the content of ``/study.json``."""
        with self._lock:
            records, running, ended = self._records, self._running, self._ended
            importance = self._importance
        self.subscribers.asked(PAGE)
        best = best_trial(records, self._metric)
        runs = {each.number: each for each in running}
        return {
            "name": self._path.name,
            "metric": self._metric.name,
            "direction": self._metric.direction,
            "headline": headline(records, self._metric, self._limits),
            "parallel": self._limits.parallel,
            "limit": self._limits.trials,
            "ended": ended,
            "best": None if best is None else best.number,
            "axes": self._axes,
            "trials": [trial_as_json(each, runs.get(each.number)) for each in records],
            "importance": sorted(importance.items(), key=lambda one: -one[1]),
            "importance_trials": IMPORTANCE_TRIALS,
        }


def axis(key: str, each: object) -> dict[str, Any]:
    """Returns a setting with the ends of its range, or with its values."""
    if isinstance(each, RealRange):
        return {"key": key, "low": each.low, "high": each.high, "log": each.log}
    if isinstance(each, WholeRange):
        return {"key": key, "low": each.low, "high": each.high, "log": False}
    return {"key": key, "values": [_plain(value) for value in getattr(each, "values", ())]}


def trial_as_json(record: TrialRecord, running: RunningTrial | None) -> dict[str, Any]:
    """Returns a trial for the page. ``running`` is the same trial if it runs in this command."""
    values = record.values if running is None else running.values
    last = values[-1].value if values else None
    phase: str = record.phase
    if phase == "running":
        # One that an earlier command has left runs again as soon as there is room for it.
        phase = "waiting" if running is None else "ending" if running.judged else "running"
    return {
        "number": record.number,
        "phase": phase,
        "value": _finite(record.value if record.value is not None else last),
        "epoch": values[-1].epoch if values else 0,
        "epochs": running.run.status.epochs if running is not None else 0,
        "seconds": _seconds(record, running),
        "point": {key: _plain(value) for key, value in record.point.items()},
        "reason": sanitize(record.reason),
        "dashboard": running.run.dashboard if running is not None else "",
    }


def _seconds(record: TrialRecord, running: RunningTrial | None) -> float | None:
    return record.seconds if running is None else time.monotonic() - running.began


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(value: object) -> object:
    """JSON knows no infinity."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


class PagedScreen:
    """Shows a study on a screen, and on its page."""

    def __init__(self, screen: StudyScreen, page: StudyPage) -> None:
        self._screen = screen
        self._page = page

    def begun(self, trial: RunningTrial, went_on: bool) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        self._screen.begun(trial, went_on)

    def evaluated(self, number: int, value: TrialValue) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        self._screen.evaluated(number, value)

    def ended(self, record: TrialRecord) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        self._screen.ended(record)

    def show(self, records: Sequence[TrialRecord], running: Sequence[RunningTrial]) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        self._page.show(records, running)
        self._screen.show(records, running)

    def note(self, line: str) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        self._screen.note(line)

    def close(self) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        self._screen.close()
