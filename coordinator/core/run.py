"""One run of a job: its settings, fixed before any peer may join."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from coordinator.core.description import JobDescription, PolicyChange
from psrpc.core.names import CHECKPOINTS
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy

MOST_POLICIES = 100
"""Most policies that a run keeps: a callback may change the learning rate again and again."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A policy of a run, with the global step and the batches done when it began. ``rate``
    multiplies the learning rate."""

    number: int
    settings: Policy
    step: int = 0
    batches: int = 0
    rate: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON types; the inverse of :meth:`from_json`."""
        return {
            "number": self.number,
            "settings": self.settings.to_json(),
            "step": self.step,
            "batches": self.batches,
            **({} if self.rate == 1.0 else {"rate": self.rate}),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Followed:
        """Reads the document that :meth:`to_json` returned."""
        settings = Policy.from_json(document["settings"])
        rate = document.get("rate", 1.0)
        return Followed(document["number"], settings, document["step"], document["batches"], rate)

    @property
    def words(self) -> str:
        """The settings, and the learning rate if it is scaled."""
        return f"{self.settings}" + (f" learning rate x {self.rate:g}" if self.rate != 1.0 else "")

    def __str__(self) -> str:
        return f"policy {self.number} ({self.words})"


def updates(settings: Policy, first: int, last: int, per_epoch: int) -> int:
    """Counts the global steps from ``first`` to ``last`` batches done, in order, with ``per_epoch``
    of them in an epoch: rounds never cross an epoch."""
    if first >= last:
        return 0
    taken = settings.taken
    (epoch, before), (last_epoch, after) = divmod(first, per_epoch), divmod(last, per_epoch)
    if epoch == last_epoch:
        return -(-(after - before) // taken)
    whole = (last_epoch - epoch - 1) * -(-per_epoch // taken)
    return -(-(per_epoch - before) // taken) + whole + -(-after // taken)


def global_step(followed: Sequence[Followed], batches: int, per_epoch: int) -> int:
    """Returns the global step after so many batches: a round, or a batch without rounds.

    If the run has fallen back to fewer batches than at a policy change, the policy in force at that
    number counts.

    Args:
        followed: oldest first, beginning with the policy in force at no batches.
        per_epoch: batches of an epoch.
    """
    index = max(i for i, one in enumerate(followed) if one.batches <= batches)
    one = followed[index]
    step = one.step + updates(one.settings, one.batches, batches, per_epoch)
    return min([step, *(later.step for later in followed[index + 1 :])])


@dataclass(frozen=True)
class RestoredCheckpoint:
    """The checkpoint that a run goes on from; ``policy`` is the number of the policy in force
    then."""

    name: str
    global_step: int
    policy: int = 1

    @property
    def directory(self) -> str:
        """Relative to the run directory."""
        return f"{CHECKPOINTS}/{self.name}"


@dataclass(frozen=True)
class Run:
    """The run that a coordinator serves. Every field is fixed before any peer may join, except
    generation, policies, since and restored, which each new generation replaces.

    Attributes:
        run_id: names the run over all its generations.
        job_path: the job file as the user gave it.
        overrides: ``key=value``, in order.
        token: proves that a process shares the run directory: it has read the token there.
        generation: the one formed last; 0 before the first of the run.
        policies: policies after the first, oldest first; the last one is in force.
        first: the initial policy, if the job names another one now.
        since: the generation since which all shards have kept their parameters.
        restored: the checkpoint that all shards restored for this generation; None if some kept
            their parameters, or began empty.
        remarks: remarks for the user on the settings.
        counted_twice: batches that may have counted twice on parts of the parameters, since the run
            was resumed with another number of shards.
        changed: settings of the job that were changed while the run went on; among the
            ``overrides``, too.
    """

    run_id: str
    run_dir: Path
    job_path: str
    overrides: tuple[str, ...]
    token: str
    description: JobDescription
    plan: Plan
    generation: int = 0
    since: int = 0
    restored: RestoredCheckpoint | None = None
    policies: tuple[Followed, ...] = ()
    first: Policy | None = None
    remarks: tuple[str, ...] = ()
    counted_twice: int = 0
    changed: Mapping[str, str] = field(default_factory=dict)

    @property
    def hosted(self) -> range:
        """The shards that workers host, as slices; none with ``dense="shards"``."""
        first = self.plan.row_shards if self.plan.slices else 0
        return range(first, self.plan.shards) if self.description.hosted else range(0)

    @property
    def followed(self) -> tuple[Followed, ...]:
        """All policies so far, including the first."""
        return (Followed(1, self.first or self.description.policy), *self.policies)

    def policies_with(self, followed: Followed) -> tuple[Followed, ...]:
        """Returns the policies after the first, with one more. Beyond ``MOST_POLICIES``, drops the
        oldest one that changed nothing but the learning rate, since counts of steps do not need
        it."""
        policies = (*self.policies, followed)
        if len(policies) <= MOST_POLICIES:
            return policies
        for index, (before, one) in enumerate(pairwise((self.followed[0], *policies[:-1]))):
            taken = updates(
                before.settings, before.batches, one.batches, self.description.per_epoch
            )
            if one.settings == before.settings and one.step == before.step + taken:
                return policies[:index] + policies[index + 1 :]
        return policies

    @property
    def policy(self) -> int:
        """The number of the policy in force; each change raises it."""
        return self.followed[-1].number

    @property
    def settings(self) -> Policy:
        """The policy in force."""
        return self.followed[-1].settings

    @property
    def rule(self) -> PolicyChange | None:
        """The rule to switch the policy, until the first change."""
        return None if self.policies else self.description.then

    @property
    def rate_scale(self) -> float:
        """The factor of the learning rate after warmup: k, the micro-batches of an update (Goyal et
        al. 2017, section 2.1), times the factor of the policy in force."""
        return self.micro_batches * self.followed[-1].rate

    @property
    def micro_batches(self) -> float:
        """k; 1 if the job does not scale its learning rate."""
        return float(self.settings.taken) if self.description.scale_lr == "linear" else 1.0

    @property
    def warmup_updates(self) -> int:
        """Optimizer updates of the warmup."""
        if self.micro_batches == 1.0:
            return 0
        description = self.description
        per_epoch = updates(self.settings, 0, description.per_epoch, description.per_epoch)
        return round(description.warmup_epochs * per_epoch)

    @property
    def settings_sha256(self) -> str:
        """Hex digest of the settings that a worker loads besides the job file. A resumed run may
        change them."""
        job = self.description
        settings = [self.overrides, job.mode, job.replicas, job.data_fingerprint]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    @property
    def first_attempt(self) -> int:
        """The first attempt number: each generation has its own range, unique in the job."""
        return (max(0, self.generation - 1) << 40) + 1


__all__ = ["Followed", "RestoredCheckpoint", "Run"]
