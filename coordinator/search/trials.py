"""Decides what a study does next, and reads the evaluations of a trial."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from coordinator.search.points import Point
from psrpc.core.errors import InvalidArgument
from psrpc.core.text import counted

Direction = Literal["max", "min"]
TrialEnd = Literal["complete", "pruned", "failed"]
TrialPhase = Literal["running", "stopped", "complete", "pruned", "failed"]

_MORE = ("acc", "auc", "precision", "recall", "f1", "iou", "r2", "similarity")
"""Parts of the names of metrics of which more is better."""


@dataclass(frozen=True)
class StudyMetric:
    """The metric that a study improves: ``name`` of the evaluations, to be as great or as little as
    possible."""

    direction: Direction
    name: str

    def __str__(self) -> str:
        return f"{self.direction}:{self.name}"

    def best(self, values: Sequence[float]) -> float:
        """Returns the best of at least one value."""
        return max(values) if self.direction == "max" else min(values)


def read_metric(text: str) -> StudyMetric:
    """Parses ``max:accuracy``. Raises InvalidArgument."""
    direction, colon, name = text.partition(":")
    if direction == "max" and name:
        return StudyMetric("max", name)
    if direction == "min" and name:
        return StudyMetric("min", name)
    other = text if not colon else name
    raise InvalidArgument(
        f"--metric is {text!r}; expected max: or min: and the name of a metric, such as "
        f"{likely_metric(other or 'accuracy')}"
    )


def likely_metric(name: str) -> StudyMetric:
    """Returns the metric of a name for a hint: more is better of those that are called like it."""
    more = any(word in name.lower() for word in _MORE)
    return StudyMetric("max" if more else "min", name)


def check_metric(metric: StudyMetric, names: Sequence[str], evaluated: bool) -> None:
    """Checks that a job reports a metric.

    Args:
        names: the metrics that the job's evaluations report.
        evaluated: whether the job evaluates anything.

    Raises:
        InvalidArgument: it does not; names those that it does report.
    """
    if not evaluated:
        raise InvalidArgument(
            f"--metric is {str(metric)!r}, and the job evaluates nothing; give it eval data: "
            "eval=Arrays(x, y)"
        )
    if metric.name not in names:
        near = get_close_matches(metric.name, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it reports {', '.join(names)}"
        raise InvalidArgument(f"--metric is {str(metric)!r}, which the job does not report; {hint}")


@dataclass(frozen=True)
class TrialValue:
    """The metric of an evaluation, after ``epoch`` epochs."""

    epoch: int
    value: float


@dataclass(frozen=True)
class TrialRecord:
    """A trial as the storage has it.

    Attributes:
        phase: ``stopped`` is under way, but does not run now; the same command goes on with it.
        values: the values of the metric, in the order of epochs.
        verdict: the `TrialEnd` to record once the run of a running trial has ended; empty if not
            decided.
        reason: why it failed or was pruned.
        seconds: for how long it ran, without pauses; None before its first end or stop.
    """

    number: int
    phase: TrialPhase
    point: Point
    values: tuple[TrialValue, ...]
    value: float | None
    verdict: str
    reason: str
    seconds: float | None


def best_trial(records: Sequence[TrialRecord], metric: StudyMetric) -> TrialRecord | None:
    """Returns the best of the trials that are complete, the first of equals; None without one."""
    done = [each for each in records if each.phase == "complete" and each.value is not None]
    if not done:
        return None
    best = metric.best([each.value for each in done if each.value is not None])
    return next(each for each in done if each.value == best)


def read_history(text: str, metric: str) -> list[TrialValue]:
    """Returns the values of a metric in the text of a ``history.csv``; skips epochs that were not
    evaluated. An evaluation with a loss that is not finite has the value NaN."""
    found = []
    for row in csv.DictReader(io.StringIO(text)):
        said = row.get(f"val_{metric}")
        if said:
            value = float(said)
            loss = row.get("val_loss")
            if loss and not math.isfinite(float(loss)):
                value = math.nan
            found.append(TrialValue(int(row["epoch"]), value))
    return found


@dataclass(frozen=True)
class StudyLimits:
    """The limits of a study.

    Attributes:
        trials: number of trials in all, including those that failed or were pruned.
        parallel: number of trials at the same time.
        max_failures: number of failed trials that the study bears; one more ends it.
    """

    trials: int
    parallel: int
    max_failures: int


@dataclass(frozen=True)
class StudyCounts:
    """The trials of a study.

    Attributes:
        begun: number of trials that were ever begun, in any state now.
        failed: number of trials that have failed.
        left: numbers of the trials that an earlier command left under way, in order.
        running: number of trials that run now.
        complete: number of trials that have a result.
    """

    begun: int
    failed: int
    left: tuple[int, ...]
    running: int
    complete: int


@dataclass(frozen=True)
class GoOnWith:
    """Starts the run of trial ``number`` again, from its newest checkpoint."""

    number: int


@dataclass(frozen=True)
class BeginTrial:
    """Starts a new trial."""


@dataclass(frozen=True)
class AwaitTrials:
    """Starts nothing before a trial ends."""

    reason: str


@dataclass(frozen=True)
class EndStudy:
    """Ends the study: trials that run are stopped with a checkpoint.

    Attributes:
        failed: whether too many trials have failed, or none is complete.
    """

    reason: str
    failed: bool = False


NextStep = GoOnWith | BeginTrial | AwaitTrials | EndStudy


def next_step(limits: StudyLimits, counts: StudyCounts, out_of_time: bool = False) -> NextStep:
    """Decides what a study does next. ``out_of_time``: whether the command's time limit is over."""
    if counts.failed > limits.max_failures:
        failed = counted(counts.failed, "trial has", "trials have")
        return EndStudy(
            f"{failed} failed; --max-failures is {limits.max_failures}, and a higher number goes "
            "on with the study",
            failed=True,
        )
    if out_of_time:
        return EndStudy("the time of --timeout is over; the same command goes on with the study")
    if counts.running >= limits.parallel:
        return AwaitTrials(f"{counted(counts.running, 'trial')} of --parallel {limits.parallel}")
    if counts.left:
        return GoOnWith(counts.left[0])
    if counts.begun < limits.trials:
        return BeginTrial()
    if counts.running:
        return AwaitTrials("the last trials")
    made = counted(limits.trials, "trial")
    if not counts.complete:
        reason = f"{made} made, and none is complete; study.csv says why"
        return EndStudy(reason, failed=True)
    return EndStudy(f"{made} made")
