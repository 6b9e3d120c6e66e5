"""Workers that heartbeats report alive and whose position does not move. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coordinator.core.wording import duration

Phase = Literal["", "waiting", "data", "compiling", "computing", "exchanging"]
"""The activity of a worker's main thread; empty if unknown."""

JUDGED: tuple[Phase, ...] = ("computing", "exchanging")
"""Phases that must end. Data may take any time, as may the first batch of a size, which compiles;
in the other phases the worker delays no other process."""

LEAST_S = 60.0
"""A worker that has not moved for a shorter time never counts as stuck."""

MEDIANS = 10.0
"""Nor does one that has not moved for fewer than this many of its own median steps."""


@dataclass(frozen=True, slots=True)
class Position:
    """A worker's progress as it last reported it.

    Attributes:
        phase: its activity.
        count: rises with every change of phase.
        median_step_s: of its last steps, without waiting for others; 0 before the first.
        since: when it was first seen in this place.
    """

    phase: Phase = ""
    count: int = 0
    median_step_s: float = 0.0
    since: float = 0.0

    def then(self, later: Position) -> Position:
        """Returns ``later``, dated back to ``self.since`` if nothing has changed."""
        if (later.phase, later.count) != (self.phase, self.count):
            return later
        return Position(later.phase, later.count, later.median_step_s, self.since)


def stands_still(position: Position, now: float) -> str:
    """Says why a worker at ``position`` counts as stuck; empty while it does not."""
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
