"""The phases of a job and the transitions between them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "waiting",
    "recovering",
    "initializing",
    "training",
    "finishing",
    "stopping",
    "restarting",
    "done",
    "failed",
]

ENDED: tuple[Phase, ...] = ("restarting", "done", "failed")
"""Phases in which the processes of the job end. ``restarting``: the run goes on, with other
processes (:data:`STOPPED_FOR`)."""

FORMING: tuple[Phase, ...] = ("waiting", "recovering")
"""Phases in which a generation is being formed: no worker trains."""

OVER: tuple[Phase, ...] = ("done", "failed")
"""Phases in which the run has ended, too."""

STOPPED = "stopped by a signal"
"""The reason of a job that a user has stopped. It is not a failure of any process."""

STOPPED_FOR = "stopped for "
"""How the reason of a job begins that ends so that its cluster starts again; settings follow."""

ENDED_EARLY = "stopped early on request"
"""The reason of a job that is done by request, with what it has trained."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The present facts about a job. ``begun`` means that every shard has begun the present
    generation; ``saved`` that there is a checkpoint to fall back to."""

    begun: bool
    initialized: bool
    saved: bool
    trained: bool
    final_saved: bool
    final_evaluated: bool


@dataclass(frozen=True, slots=True)
class Transition:
    """The next phase and the reason for it."""

    phase: Phase
    reason: str


def next_phase(phase: Phase, facts: Facts) -> Transition | None:
    """Returns the transition out of ``phase``, or None if the job stays."""
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
