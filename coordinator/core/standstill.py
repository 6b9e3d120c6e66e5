"""Workers that give signs of life and do not move. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coordinator.core.wording import duration

Phase = Literal["", "waiting", "data", "compiling", "computing", "exchanging"]
"""What a worker's main thread does; empty where it does not say."""

JUDGED: tuple[Phase, ...] = ("computing", "exchanging")
"""Phases that have to end. Data may take any time, as may the first batch of a size, which
compiles; in the others the worker holds up no one."""

LEAST_S = 60.0
"""A worker that has not moved for less than this is never taken for stuck."""

MEDIANS = 10.0
"""Nor is one that has not moved for less than so many times its own median step."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a worker has come, as it said last.

    Attributes:
        phase: what it does.
        count: rises with every change of phase.
        median_step_s: of its last steps, without waiting for others; 0 before the first.
        since: when it was first seen there.
    """

    phase: Phase = ""
    count: int = 0
    median_step_s: float = 0.0
    since: float = 0.0

    def then(self, later: Position) -> Position:
        """``later``, which is the same place since ``self.since`` if nothing has changed."""
        if (later.phase, later.count) != (self.phase, self.count):
            return later
        return Position(later.phase, later.count, later.median_step_s, self.since)


def stands_still(position: Position, now: float) -> str:
    """Why a worker at ``position`` is taken for stuck; empty while it is not."""
    if position.phase not in JUDGED or position.median_step_s <= 0:
        return ""
    limit_s = max(LEAST_S, MEDIANS * position.median_step_s)
    stood_s = now - position.since
    if stood_s <= limit_s:
        return ""
    return (
        f"has been {position.phase} without moving (for {duration(stood_s)}); its median step "
        f"takes {duration(position.median_step_s)}, and {duration(limit_s)} are allowed"
    )
