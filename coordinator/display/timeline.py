"""Derives events from two successive statuses of a job, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from coordinator.core.wording import checkpoint, metrics, shard_name, without_count
from psrpc.v1.coordinator_pb2 import GetJobStatusResponse

Kind = Literal[
    "phase",
    "mode",
    "member",
    "failure",
    "restart",
    "evaluation",
    "checkpoint",
    "waiting",
    "warning",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

EVALUATIONS_SHOWN = 5

_GONE = ("silent", "left", "missing")


@dataclass(frozen=True, slots=True)
class Event:
    """An event in plain text. ``kind`` lets displays filter."""

    kind: Kind
    text: str


def events_between(last: GetJobStatusResponse, status: GetJobStatusResponse) -> list[Event]:
    """Returns the events between ``last`` and ``status``; ``last`` is empty before the first."""
    found: list[Event] = []
    if status.restored and status.restored != last.restored:
        found.append(Event("restart", goes_on(status.restored)))
    changes = (last.phase, status.phase)
    passing = _goes_over(status) or (_goes_over(last) and changes == ("recovering", "training"))
    if status.phase != last.phase and not passing:
        kind: Kind = "failure" if status.phase == "failed" else "phase"
        found.append(Event(kind, f"{status.job}: {status.phase}"))
    if status.generation > max(last.generation, 1) and _recoveries(status) > _recoveries(last):
        found.append(Event("restart", f"generation {status.generation}"))
    if status.policy > max(last.policy, 1):
        rate = status.policies[-1].learning_rate if status.policies else ""
        found.append(Event("mode", rate or f"policy {status.policy}: {status.settings}"))
    if status.switching and status.switching != last.switching:
        found.append(Event("mode", f"under way: {status.switching}"))
    found += _members(
        {shard_name(shard): (shard.state, shard.incarnation) for shard in last.shards},
        {shard_name(shard): (shard.state, shard.incarnation) for shard in status.shards},
    )
    found += _members(
        {w.worker: (w.state, w.incarnation) for w in last.workers},
        {w.worker: (w.state, w.incarnation) for w in status.workers},
    )
    found += [
        Event("evaluation", f"evaluation {line}")
        for line in _new(evaluations(last), evaluations(status))
    ]
    # The run directory may be gone, which is a warning of its own.
    if status.newest_checkpoint not in ("", last.newest_checkpoint):
        found.append(Event("checkpoint", f"checkpoint {status.newest_checkpoint}"))
    if status.waiting_for and status.waiting_for != last.waiting_for:
        found.append(Event("waiting", f"waiting for {status.waiting_for}"))
    found += [
        Event("warning", f"warning: {line}")
        for line in _new_warnings(last.warnings, status.warnings)
    ]
    return found


def _goes_over(status: GetJobStatusResponse) -> bool:
    """Whether shards are about to begin the generation of a stored change of policy, in which
    nothing is lost."""
    changed = status.policy > 1 and status.policies
    return (
        bool(changed)
        and status.phase == "recovering"
        and status.policies[-1].global_step == status.global_step
    )


def _recoveries(status: GetJobStatusResponse) -> int:
    """Returns the number of generations that a recovery, not a change of policy, has begun."""
    changes = max(status.policy, 1) - 1 - _goes_over(status)
    return max(status.generation, 1) - 1 - changes


def evaluations(status: GetJobStatusResponse) -> list[str]:
    """Returns ``"epoch-1 at step 200: loss 0.1234, accuracy 0.9700"``, oldest first."""
    return [
        f"{found.evaluation} at step {found.global_step}: {metrics(found.results)}"
        for found in status.evaluations
    ]


def newest_evaluations(status: GetJobStatusResponse) -> list[str]:
    """Returns a line for each of the newest evaluations, after one that counts the earlier ones."""
    found = [f"evaluation {line}" for line in evaluations(status)]
    earlier = len(found) - EVALUATIONS_SHOWN
    if earlier > 0:
        noun = "evaluation" if earlier == 1 else "evaluations"
        found[:earlier] = [f"{earlier} earlier {noun}"]
    return found


def goes_on(restored: str) -> str:
    """Returns the line of a job whose shards restore a checkpoint."""
    return f"going on from {checkpoint(restored)}"


def _members(
    before: Mapping[str, tuple[str, int]], after: Mapping[str, tuple[str, int]]
) -> list[Event]:
    found = []
    for name, (state, incarnation) in after.items():
        old_state, old = before.get(name, ("missing", 0))
        if state == old_state:
            continue
        kind: Kind = "member"
        if state == "silent":
            kind = "failure"
        elif state not in _GONE and (old_state == "silent" or old not in (0, incarnation)):
            kind = "restart"
        found.append(Event(kind, f"{name} {'has' if state == 'left' else 'is'} {state}"))
    return found


def _new_warnings(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Like :func:`_new`, but the count of epochs without an evaluation is no news as it grows."""
    said = set(map(without_count, before))
    return [line for line in _new(before, after) if without_count(line) not in said]


def _new(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Returns the new entries of a list that grows at its end and may be cut at its start."""
    known = set(before)
    return [line for line in after if line not in known]
