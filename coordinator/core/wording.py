"""Figures and names as a person reads them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

Phase = Literal["", "waiting", "data", "compiling", "computing", "exchanging"]
"""What a worker's main thread does; empty where it does not say."""

JUDGED: tuple[Phase, ...] = ("computing", "exchanging")
"""Phases that have to end. Data may take any time, as may the first batch of a size, which
compiles; in the others the worker holds up no one."""

LEAST_S = 60.0
"""A worker that has not moved for less than this is never taken for stuck."""

MEDIANS = 10.0
"""Nor is one that has not moved for less than so many times its own median step."""


if TYPE_CHECKING:
    from psrpc.v1.coordinator_pb2 import GetJobStatusResponse, ShardStatus, WorkerStatus

MISSED_S = 3.0
"""A silence that is shown although the lease has not lapsed: two signs of life have not come."""


def duration(seconds: float) -> str:
    """``"4.2 s"``, ``"1:05"`` or ``"2:01:05"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def metrics(results: Mapping[str, float]) -> str:
    """``"loss 0.1234, accuracy 0.9700"``: the loss first, the others by name."""
    names = sorted(results, key=lambda name: (name != "loss", name))
    return ", ".join(f"{name} {results[name]:.4f}" for name in names)


def checkpoint(name: str) -> str:
    """``"checkpoint step-00000500.g2 (step 500)"``."""
    at = step_of(name)
    return f"checkpoint {name}" + ("" if at is None else f" (step {at})")


def step_of(name: str) -> int | None:
    """The global step in a checkpoint's name, or in the path of one; None where there is none."""
    found = re.match(r"step-(\d+)", name.rpartition("/")[2])
    return int(found[1]) if found else None


def whence(status: GetJobStatusResponse) -> str:
    """What the job goes on from, while nobody knows at which step; empty once that is known."""
    if status.phase != "recovering":
        return ""
    if status.restored:
        return f"restoring from {status.restored}"
    # Shards that are still there may hold more.
    newest = status.newest_checkpoint.rpartition("/")[2]
    return f"going on from {newest} or later" if newest and not status.global_step else ""


def step(status: GetJobStatusResponse) -> str:
    """``"step 300/1200 (25 %)"``; there have to be steps."""
    percent = 100 * status.global_step / status.total_steps
    return f"step {status.global_step}/{status.total_steps} ({percent:.0f} %)"


def loss_known(status: GetJobStatusResponse) -> bool:
    """Whether the loss is that of steps, be it NaN, and not missing because there were none."""
    return status.steps_done > 0 or not math.isnan(status.loss)


def batches(status: GetJobStatusResponse) -> str:
    """What is counted of a job: a step of sync mode is a round of several micro-batches."""
    return "micro-batches" if status.mode == "sync" else "batches"


def state(member: ShardStatus | WorkerStatus) -> str:
    """``"active"``, ``"active, silent for 4.0 s"``, or ``"silent for 12.0 s"`` after a lease."""
    silence = f"silent for {duration(member.silent_s)}"
    if member.state == "silent":
        return silence
    missed = member.state not in ("left", "missing") and member.silent_s >= MISSED_S
    return f"{member.state}, {silence}" if missed else member.state


def shards(indices: Iterable[int]) -> str:
    """``"shard 1"`` or ``"shards 0, 2"``; at least one."""
    names = [str(index) for index in indices]
    return f"shard{'s' if len(names) > 1 else ''} {', '.join(names)}"


def of(have: int, of_all: int, noun: str, nouns: str) -> str:
    """``"0 of 1 task"`` or ``"1 of 2 tasks"``."""
    return f"{have} of {of_all} {noun if of_all == 1 else nouns}"


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
