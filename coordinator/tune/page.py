"""Keeps the newest state of a study for the browsers that look at its page."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.dashboard.site import Site
from coordinator.dashboard.snapshots import PAGE, Subscribers
from coordinator.search.points import Space
from coordinator.search.study_page import StudyState, TrialProgress, study_document
from coordinator.search.trials import StudyLimits, StudyMetric, TrialRecord, TrialValue
from coordinator.tune.engine import RunningTrial, StudyScreen
from coordinator.tune.screen import headline


class StudyPage:
    """Passes the state from the thread of the study to the page's server. Thread-safe: one lock
    guards the state, which is replaced as a whole. Figures are made when a browser asks."""

    def __init__(self, path: Path, metric: StudyMetric, limits: StudyLimits, space: Space) -> None:
        self._path = path
        self._metric = metric
        self._limits = limits
        self._space = space
        self._lock = threading.Lock()
        self._state = StudyState()
        self._running: tuple[RunningTrial, ...] = ()
        self.subscribers = Subscribers(time.monotonic)
        self.site = Site("study.html", {"/study.json": self.study})

    def show(self, records: Sequence[TrialRecord], running: Sequence[RunningTrial]) -> None:
        """Stores all trials of the study, a list that does not change any more, and those that run.
        The study calls it ten times a second, so it does no more than that."""
        with self._lock:
            if records is not self._state.records:
                self._state = replace(self._state, records=records)
            self._running = tuple(running)

    def show_importance(self, importance: Mapping[str, float]) -> None:
        """Stores what :meth:`coordinator.tune.optuna_study.OptunaStudy.importance` returns."""
        self._change(importance=importance)

    def end(self, reason: str, records: Sequence[TrialRecord]) -> None:
        """Stores why the study has ended, and its last state."""
        self.show(records, ())
        self._change(ended=reason)
        self.subscribers.changed()

    def study(self) -> dict[str, Any]:
        """Returns the content of ``/study.json``, see
        :func:`coordinator.search.study_page.study_document`."""
        with self._lock:
            state, running, now = self._state, self._running, time.monotonic()
        self.subscribers.asked(PAGE)
        state = replace(state, running={each.number: _progress(each, now) for each in running})
        document = study_document(self._metric, self._limits, self._space, state)
        line = headline(state.records, self._metric, self._limits)
        return {"name": self._path.name, "headline": line, **document}

    def _change(self, **new: Any) -> None:
        with self._lock:
            self._state = replace(self._state, **new)


def _progress(trial: RunningTrial, now: float) -> TrialProgress:
    epochs, url = trial.run.status.epochs, trial.run.dashboard
    return TrialProgress(tuple(trial.values), trial.judged, epochs, now - trial.began, url)


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

    def close(self, records: Sequence[TrialRecord]) -> None:
        """See :class:`coordinator.tune.engine.StudyScreen`."""
        self._screen.close(records)
