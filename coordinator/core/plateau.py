"""Early stopping and lower learning rates when an evaluation stops improving. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.core.retention import Objective
from psrpc.core.text import counted


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """An early stop after ``epoch``, and the reason. ``best`` is the best epoch, 0 if there is
    none; both count from 1."""

    epoch: int
    best: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopEarly:
    """Stops a run after ``patience`` epochs in a row that were not better than the best one before
    them by more than ``min_delta``. With ``restore_best`` the run ends with the best epoch's
    checkpoint."""

    objective: Objective
    patience: int = 0
    min_delta: float = 0.0
    restore_best: bool = False

    def judge(self, results: Sequence[float | None]) -> EarlyStop | None:
        """Decides whether to stop after ``results``, one per epoch; None for an epoch that was not
        evaluated."""
        best, at, waited, over = math.nan, 0, 0, False
        for epoch, value in enumerate(results, 1):
            if value is None:
                continue
            waited += 1
            over = False
            if _better(self.objective, value, best, self.min_delta):
                best, at, waited = value, epoch, 0
            else:
                over = waited >= self.patience and epoch > 1
        if not over:
            return None
        epoch = len(results)
        what = f"{self.objective.metric} did not improve for {counted(waited, 'epoch')}"
        known = f"best epoch {at}" if at else "it was never a number"
        return EarlyStop(epoch, at, f"stopped early at epoch {epoch}: {what}; {known}")


@dataclass(frozen=True, slots=True)
class ReduceLr:
    """Multiplies the learning rate by ``factor`` after ``patience`` epochs in a row that were not
    better than the best one before them by more than ``min_delta``. The ``cooldown`` epochs after
    that do not count."""

    objective: Objective
    factor: float = 0.1
    patience: int = 10
    min_delta: float = 1e-4
    cooldown: int = 0
    min_lr: float = 0.0

    def rate(self, results: Sequence[float | None], first: float) -> float:
        """Returns the factor of the learning rate ``first`` after these results."""
        rate, best, waited, cooling = 1.0, math.nan, 0, 0
        for value in results:
            if value is None:
                continue
            if cooling:
                cooling, waited = cooling - 1, 0
            if _better(self.objective, value, best, self.min_delta):
                best, waited = value, 0
            elif not cooling:
                waited += 1
                if waited >= self.patience and first * rate > self.min_lr:
                    rate = max(rate * self.factor, self.min_lr / first)
                    cooling, waited = self.cooldown, 0
        return rate


@dataclass(frozen=True, slots=True)
class Review:
    """The consequences of the finished epochs.

    Attributes:
        until: epochs before this one may begin.
        awaited: the epoch, from 0, whose results must come first.
        stopped: the early stop, or None while training goes on.
        rate: the factor of the next epoch's learning rate.
    """

    until: int
    awaited: int | None = None
    stopped: EarlyStop | None = None
    rate: float = 1.0


def review(
    evaluations: Sequence[Mapping[str, float]],
    stop_early: StopEarly | None,
    reduce_lr: ReduceLr | None,
    *,
    at_end: bool,
    epochs: int,
    first_rate: float,
) -> Review:
    """Reviews the ``evaluations`` of the finished epochs; an unknown one is empty.

    Args:
        at_end: no batch of the next epoch is done, so that the last one can still be evaluated.
        epochs: number of epochs of the job.
        first_rate: the job's initial learning rate.
    """
    done = len(evaluations)
    if done and at_end and done < epochs and not evaluations[-1]:
        before = review(
            evaluations[:-1], None, reduce_lr, at_end=False, epochs=epochs, first_rate=first_rate
        )
        return Review(done, done - 1, None, before.rate)
    stopped = None
    if stop_early is not None and at_end:
        stopped = stop_early.judge(evaluations_of(evaluations, stop_early.objective))
    rate = 1.0
    if reduce_lr is not None:
        rate = reduce_lr.rate(evaluations_of(evaluations, reduce_lr.objective), first_rate)
    return Review(done if stopped else done + 1, None, stopped, rate)


def best_epoch(results: Sequence[float | None], objective: Objective) -> int | None:
    """Returns the epoch of the best result, from 1, the first of equals; None without any."""
    best = math.nan
    best_at = None
    for epoch, value in enumerate(results, 1):
        if value is not None and _better(objective, value, best, 0.0):
            best, best_at = value, epoch
    return best_at


def _better(objective: Objective, value: float, best: float, min_delta: float) -> bool:
    """Whether ``value`` is better; NaN never is, and any number is better than none."""
    if math.isnan(best):
        return not math.isnan(value)
    gain = best - value if objective.lower else value - best
    return gain > min_delta


def evaluations_of(
    evaluations: Sequence[Mapping[str, float]], objective: Objective
) -> list[float | None]:
    """Returns the objective's results, epoch by epoch."""
    return [found.get(objective.metric) for found in evaluations]
