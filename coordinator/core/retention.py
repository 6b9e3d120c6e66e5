"""Which checkpoints a run keeps: the newest few, and the best. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


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
