"""Decides from which state shards begin: at the start, and after the loss of shards or coordinator.

See ``docs/design/0008-recovery.md``. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.core.wording import shards, step_of
from psrpc.core.commands import Begin, Decision
from psrpc.core.errors import CheckpointError
from psrpc.core.policy import Policy
from psrpc.core.shard_reports import HeldState
from psrpc.core.text import counted


@dataclass(frozen=True, slots=True)
class Origin:
    """The order with which each shard begins, and the reason. ``kept`` means that all shards keep
    their state, so that the history of earlier generations goes on."""

    begins: tuple[Begin, ...]
    reason: str
    kept: bool


def why_restore(
    holdings: Sequence[HeldState], settings: Policy, since: int, decision: Decision | None
) -> str:
    """Says why the shards cannot all keep their state; empty if they can.

    Args:
        since: the generation since which all shards have kept their state. In sync mode, a state
            from an older one belongs to another history.
        decision: the newest that was stored since; it may have reached only some shards.
    """
    lacking = _lacking(holdings)
    if lacking:
        return f"{shards(lacking)} hold{'s' if len(lacking) == 1 else ''} no parameters"
    if not settings.rounds:
        return ""
    generations = {holding.generation for holding in holdings}
    if min(generations) < since:
        return f"the shards stand at generations {sorted(generations)}"
    versions = {holding.version for holding in holdings}
    together = len(versions) == 1
    if decision is not None:
        together = versions <= {decision.round, decision.round + 1}
    return "" if together else f"the shards stand at rounds {sorted(versions)}"


def choose_origin(
    holdings: Sequence[HeldState],
    settings: Policy,
    generation: int,
    policy: int,
    *,
    since: int,
    decision: Decision | None,
    checkpoint: str | None,
    committed: bool,
    version: int | None = None,
) -> Origin:
    """Returns each shard's order, by index.

    Args:
        settings, policy: the policy in force, and its number.
        generation: the one being formed.
        since, decision: as in :func:`why_restore`.
        checkpoint: the newest good one, relative to the run directory; None if there is none.
        committed: whether this run has ever committed a checkpoint. Training begins only after the
            first, so without any there is nothing to lose.
        version: the version that shards take on with the restored checkpoint; None for its own.

    Raises:
        CheckpointError: parameters were lost, and no good checkpoint is left.
    """
    lost = why_restore(holdings, settings, since, decision)
    if not lost:
        keep = Begin(generation, policy, keep=True, decision=decision, settings=settings)
        return Origin(tuple(keep for _ in holdings), "all shards keep theirs", kept=True)
    if checkpoint is None:
        if committed:
            raise CheckpointError(f"{lost}, and no checkpoint of this run is good", code="PS404")
        fresh = Begin(generation, policy, settings=settings)
        reason = f"{lost}, and no checkpoint was ever committed: a worker initializes all shards"
        return Origin(tuple(fresh for _ in holdings), reason, kept=False)
    restore = Begin(generation, policy, restore=checkpoint, settings=settings, version=version)
    if settings.rounds:
        reason = f"{lost}: all shards restore {checkpoint}"
        return restore_all(restore, len(holdings), reason)
    keep = Begin(generation, policy, keep=True, settings=settings)
    begins = tuple(keep if holding.initialized else restore for holding in holdings)
    they = "it restores" if len(_lacking(holdings)) == 1 else "they restore"
    return Origin(begins, f"{lost}: {they} {checkpoint}", kept=False)


def restore_all(restore: Begin, shards: int, reason: str) -> Origin:
    """Returns the same order to ``restore`` for every shard; the history of their present state
    ends."""
    return Origin((restore,) * shards, reason, kept=False)


def order_in_words(begin: Begin) -> str:
    """Describes the state with which ``begin`` orders a shard to begin."""
    if begin.restore:
        return f"restore {begin.restore}"
    return "keep what it holds" if begin.keep else "begin with nothing"


def _lacking(holdings: Sequence[HeldState]) -> list[int]:
    return [index for index, holding in enumerate(holdings) if not holding.initialized]


def went_back(generation: int, before: int, after: int, source: str) -> str:
    """Describes the loss of a job whose ``generation`` begins at an earlier global step than the
    previous one had reached; empty if there is none.

    Args:
        before, after: the global steps.
        source: the restored checkpoint; empty for none.
    """
    if after >= before:
        return ""
    lost = before - after
    steps = counted(lost, "step is", "steps are")
    # A checkpoint is named after the step of its order; async training goes on until that arrives.
    named = step_of(source)
    more = 0 if named is None else after - named
    beyond = f", which holds {counted(more, 'step')} beyond its name" if more > 0 else ""
    return (
        f"generation {generation}: back to step {after} ({source or 'no checkpoint'}{beyond}): "
        f"{steps} done again"
    )


def go_over(
    holdings: Sequence[HeldState], settings: Policy, generation: int, policy: int, step: int
) -> Origin:
    """Returns the orders for a policy change in which no shard was lost. All shards hold the same
    batches; each keeps its state, and its version becomes the global ``step``."""
    keep = Begin(generation, policy, keep=True, settings=settings, version=step)
    return Origin(tuple(keep for _ in holdings), f"policy {policy} stands: {settings}", kept=True)
