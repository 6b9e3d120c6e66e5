"""The content of a study's web page, made of its trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.search.points import Space
from coordinator.search.space import Alternatives, Range
from coordinator.search.trials import (
    StudyLimits,
    StudyMetric,
    TrialRecord,
    TrialValue,
    best_trial,
)
from psrpc.core.text import sanitize

IMPORTANCE_TRIALS = 10
"""Fewest complete trials for an estimate of the importance of settings. It asks what the best tenth
has in common, which one trial alone does not tell from chance."""


@dataclass(frozen=True)
class TrialProgress:
    """A trial that runs now.

    Attributes:
        values: the values of the metric until now.
        ending: whether its run is being ended.
        epochs: number of its epochs, 0 if unknown.
        seconds: time since it was started.
        dashboard: the URL of its run's dashboard; empty if there is none, or not yet.
    """

    values: Sequence[TrialValue]
    ending: bool
    epochs: int
    seconds: float
    dashboard: str


@dataclass(frozen=True)
class StudyState:
    """A study at one moment.

    Attributes:
        running: the trials that run now, by number.
        importance: shares of the settings; empty if they are not known.
        ended: why the study has ended; empty before.
    """

    records: Sequence[TrialRecord] = ()
    running: Mapping[int, TrialProgress] = field(default_factory=dict)
    importance: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""


def study_document(
    metric: StudyMetric, limits: StudyLimits, space: Space, state: StudyState
) -> dict[str, Any]:
    """Returns a study as JSON values; figures that are not finite are null."""
    best = best_trial(state.records, metric)
    ended = sanitize(state.ended)
    return {
        "metric": metric.name,
        "direction": metric.direction,
        "parallel": limits.parallel,
        "limit": limits.trials,
        "ended": ended,
        "best": None if best is None else best.number,
        "axes": [axis_document(key, each) for key, each in space.ranges.items()],
        "trials": [
            trial_document(each, state.running.get(each.number), bool(ended))
            for each in state.records
        ],
        "importance": sorted(state.importance.items(), key=lambda one: -one[1]),
        "importance_trials": IMPORTANCE_TRIALS,
    }


def axis_document(key: str, each: Range) -> dict[str, Any]:
    """Returns a setting with the ends of its range, or with its values."""
    if isinstance(each, Alternatives):
        return {"key": key, "values": [_plain(value) for value in each.values]}
    return {"key": key, "low": each.low, "high": each.high, "log": each.log}


def trial_document(
    record: TrialRecord, running: TrialProgress | None, study_ended: bool
) -> dict[str, Any]:
    """Returns a trial for the page; ``running`` is the same trial if it runs now."""
    values = record.values if running is None else running.values
    last = values[-1].value if values else None
    phase: str = record.phase
    if running is not None:
        phase = "ending" if running.ending else "running"
    elif phase in ("running", "stopped"):
        # An earlier command has left it; it runs again as soon as there is room for it.
        phase = "stopped" if study_ended else "waiting"
    return {
        "number": record.number,
        "phase": phase,
        "value": _finite(record.value if record.value is not None else last),
        "epoch": values[-1].epoch if values else 0,
        "epochs": running.epochs if running is not None else 0,
        "seconds": record.seconds if running is None else running.seconds,
        "point": {key: _plain(value) for key, value in record.point.items()},
        "reason": sanitize(record.reason),
        "dashboard": running.dashboard if running is not None else "",
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(value: object) -> object:
    """JSON knows no infinity."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
