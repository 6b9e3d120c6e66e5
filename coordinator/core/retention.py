"""Decides which checkpoints a run keeps: the newest few, and the best. Pure."""

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
class KeptCheckpoint:
    """A present checkpoint. A higher generation is newer, then a higher step."""

    name: str
    generation: int
    global_step: int

    @property
    def age(self) -> tuple[int, int]:
        """The key that orders checkpoints and that evaluations refer to."""
        return self.generation, self.global_step


def best_of(
    present: Sequence[KeptCheckpoint],
    objective: Objective | None,
    scores: Mapping[tuple[int, int], float],
) -> str | None:
    """Returns the name of the best evaluated checkpoint, the oldest of equals, or None."""
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
    present: Sequence[KeptCheckpoint],
    keep: int,
    objective: Objective | None,
    scores: Mapping[tuple[int, int], float],
    *,
    damaged: Collection[str] = (),
    in_use: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns the names of removable checkpoints, oldest first.

    Args:
        present: all present checkpoints, in any order.
        keep: how many of the newest stay, at least 1; damaged ones do not count.
        objective: selects the best, which stays too. None keeps no best.
        scores: the objective's results, by generation and global step.
        damaged: names of damaged checkpoints; they go when they are old enough.
        in_use: names of checkpoints that stay at any age.
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
