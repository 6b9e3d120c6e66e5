"""Which checkpoints a run keeps: the newest few, and the best. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from psrpc.core.text import counted


@dataclass(frozen=True, slots=True)
class Objective:
    """The evaluation result by which one checkpoint is better than another."""

    metric: str
    lower: bool
    """Whether less is better."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that is there. Newer is of a higher generation, and in it of a higher step."""

    name: str
    generation: int
    global_step: int

    @property
    def age(self) -> tuple[int, int]:
        """What checkpoints are ordered by, and what evaluations name them by."""
        return self.generation, self.global_step


def best_of(
    present: Sequence[Kept], objective: Objective | None, scores: Mapping[tuple[int, int], float]
) -> str | None:
    """The name of the best one that has been evaluated, of equals the oldest; None without any."""
    if objective is None:
        return None
    sign = 1 if objective.lower else -1
    known = [
        (sign * scores[kept.age], kept.age, kept.name)
        for kept in present
        if not math.isnan(scores.get(kept.age, math.nan))
    ]
    return min(known)[-1] if known else None


def superfluous(
    present: Sequence[Kept],
    keep: int,
    objective: Objective | None,
    scores: Mapping[tuple[int, int], float],
    *,
    damaged: Collection[str] = (),
    in_use: Collection[str] = (),
) -> tuple[str, ...]:
    """The names of checkpoints that may go, oldest first.

    Args:
        present: all that are there, in any order.
        keep: how many of the newest stay, at least 1; those that are damaged do not count.
        objective: what the best one is best in; it stays as well. None keeps no best.
        scores: the objective's results, by generation and global step.
        damaged: names of those that are known to be; they go when they are old enough.
        in_use: names of those that stay whatever their age.
    """
    assert keep >= 1
    good = sorted((k for k in present if k.name not in damaged), key=lambda k: k.age, reverse=True)
    if len(good) <= keep:
        return ()
    oldest = good[keep - 1].age
    best = best_of(good, objective, scores)
    return tuple(
        kept.name
        for kept in sorted(present, key=lambda k: k.age)
        if kept.age < oldest and kept.name != best and kept.name not in in_use
    )


@dataclass(frozen=True, slots=True)
class Stopped:
    """A run stops after ``epoch``, which counts from 1 as ``best`` does (0 for none), and why."""

    epoch: int
    best: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopEarly:
    """When a run stops: ``patience`` epochs are not better than the best one before by more than
    ``min_delta``. With ``restore_best`` the run comes to the best epoch's checkpoint."""

    objective: Objective
    patience: int = 0
    min_delta: float = 0.0
    restore_best: bool = False

    def judge(self, results: Sequence[float | None]) -> Stopped | None:
        """Args:
        results: the objective's, epoch by epoch; None of one that was not evaluated.
        """
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
        return Stopped(epoch, at, f"stopped early at epoch {epoch}: {what}; {known}")


@dataclass(frozen=True, slots=True)
class ReduceLr:
    """When the learning rate is multiplied by ``factor``: ``patience`` epochs are not better than
    the best one before by more than ``min_delta``. After that ``cooldown`` epochs do not count."""

    objective: Objective
    factor: float = 0.1
    patience: int = 10
    min_delta: float = 1e-4
    cooldown: int = 0
    min_lr: float = 0.0

    def rate(self, results: Sequence[float | None], first: float) -> float:
        """What the learning rate ``first`` is to be multiplied by after these results."""
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
    """What follows from the epochs that are done.

    Attributes:
        until: epochs before this one may be begun.
        awaited: the epoch whose results are awaited before that; counts from 0.
        stopped: set when nothing more is begun.
        rate: what the learning rate of the next epoch is multiplied by.
    """

    until: int
    awaited: int | None = None
    stopped: Stopped | None = None
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
    """What follows from the ``evaluations`` of the epochs that are done, of which each is empty as
    long as it is not known.

    Args:
        at_end: no batch of the next epoch is done, so that the last one can still be evaluated.
        epochs: of the job.
        first_rate: the learning rate that it begins with.
    """
    done = len(evaluations)
    if done and at_end and done < epochs and not evaluations[-1]:
        before = review(
            evaluations[:-1], None, reduce_lr, at_end=False, epochs=epochs, first_rate=first_rate
        )
        return Review(done, done - 1, None, before.rate)
    stopped = None
    if stop_early is not None and at_end:
        stopped = stop_early.judge(results_of(evaluations, stop_early.objective))
    rate = 1.0
    if reduce_lr is not None:
        rate = reduce_lr.rate(results_of(evaluations, reduce_lr.objective), first_rate)
    return Review(done if stopped else done + 1, None, stopped, rate)


def best_epoch(results: Sequence[float | None], objective: Objective) -> int | None:
    """The epoch of the best result, from 1, of equals the first; None without any."""
    best = math.nan
    found = None
    for epoch, value in enumerate(results, 1):
        if value is not None and _better(objective, value, best, 0.0):
            best, found = value, epoch
    return found


def results_of(
    evaluations: Sequence[Mapping[str, float]], objective: Objective
) -> list[float | None]:
    """The objective's results, epoch by epoch."""
    return [found.get(objective.metric) for found in evaluations]


def _better(objective: Objective, value: float, best: float, min_delta: float) -> bool:
    """Whether ``value`` is better; NaN never is, and any number is better than none."""
    if math.isnan(best):
        return not math.isnan(value)
    gain = best - value if objective.lower else value - best
    return gain > min_delta
