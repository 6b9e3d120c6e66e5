"""The phases of a job, and what takes it from one to the next. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "waiting", "recovering", "initializing", "training", "finishing", "stopping", "done", "failed"
]

ENDED: tuple[Phase, ...] = ("done", "failed")

FORMING: tuple[Phase, ...] = ("waiting", "recovering")
"""A generation is formed, or cannot be yet: no worker trains."""

STOPPED = "stopped by a signal"
"""Why a job has failed that a person has stopped: not a failure of any process."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true of a job now. ``begun`` means that every shard has begun the present
    generation; ``saved`` that there is a checkpoint to fall back to."""

    begun: bool
    initialized: bool
    saved: bool
    trained: bool
    final_saved: bool
    final_evaluated: bool


@dataclass(frozen=True, slots=True)
class Transition:
    """The next phase and why it has come."""

    phase: Phase
    reason: str


def next_phase(phase: Phase, facts: Facts) -> Transition | None:
    """Where the job goes from ``phase``, or None if it stays."""
    if phase in ENDED or phase == "stopping":
        return None
    if not facts.begun:
        return None if phase in FORMING else Transition("recovering", "its generation is over")
    if phase in FORMING:
        if facts.initialized and facts.saved:
            return Transition("training", "all shards hold parameters")
        return Transition("initializing", "all shards are ready")
    if phase == "initializing" and facts.initialized and facts.saved:
        return Transition("training", "all shards are initialized and saved")
    if phase == "training" and facts.trained:
        return Transition("finishing", "all batches are done")
    if phase == "finishing" and facts.final_saved and facts.final_evaluated:
        return Transition("done", "the final state is saved and evaluated")
    return None
