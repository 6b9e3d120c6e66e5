"""One run of a job: what is settled before anyone is let in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.core.description import JobDescription, Rule
from psrpc.core.names import CHECKPOINTS
from psrpc.core.plan import Plan
from psrpc.core.policy import Policy


@dataclass(frozen=True, slots=True)
class Followed:
    """A policy that a run came to follow, with the global step and the batches done by then.
    ``rate`` multiplies the learning rate."""

    number: int
    settings: Policy
    step: int = 0
    batches: int = 0
    rate: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; the inverse of :meth:`from_json`."""
        return {
            "number": self.number,
            "settings": self.settings.to_json(),
            "step": self.step,
            "batches": self.batches,
            **({} if self.rate == 1.0 else {"rate": self.rate}),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Followed:
        """As it was stored."""
        settings = Policy.from_json(document["settings"])
        rate = document.get("rate", 1.0)
        return Followed(document["number"], settings, document["step"], document["batches"], rate)

    @property
    def words(self) -> str:
        """The settings, and the learning rate if that is another."""
        return f"{self.settings}" + (f" learning rate x {self.rate:g}" if self.rate != 1.0 else "")

    def __str__(self) -> str:
        return f"policy {self.number} ({self.words})"


def updates(settings: Policy, first: int, last: int, per_epoch: int) -> int:
    """Global steps that turn ``first`` batches done into ``last``, in order, with ``per_epoch`` of
    them in an epoch: rounds never cross an epoch."""
    if first >= last:
        return 0
    taken = settings.taken
    (epoch, before), (last_epoch, after) = divmod(first, per_epoch), divmod(last, per_epoch)
    if epoch == last_epoch:
        return -(-(after - before) // taken)
    whole = (last_epoch - epoch - 1) * -(-per_epoch // taken)
    return -(-(per_epoch - before) // taken) + whole + -(-after // taken)


def global_step(followed: Sequence[Followed], batches: int, per_epoch: int) -> int:
    """The global step of so many batches done: a round, or a batch without rounds.

    In a history that fell back behind a change it goes by the policy that stood then.

    Args:
        followed: oldest first, beginning with the policy that stood at no batches.
        per_epoch: batches of an epoch.
    """
    index = max(i for i, one in enumerate(followed) if one.batches <= batches)
    one = followed[index]
    step = one.step + updates(one.settings, one.batches, batches, per_epoch)
    return min([step, *(later.step for later in followed[index + 1 :])])


@dataclass(frozen=True)
class RestoredCheckpoint:
    """The checkpoint that a run goes on from; ``policy`` is the number of the one that stood."""

    name: str
    global_step: int
    policy: int = 1

    @property
    def directory(self) -> str:
        """Relative to the run directory."""
        return f"{CHECKPOINTS}/{self.name}"


@dataclass(frozen=True)
class Run:
    """What a job's coordinator serves. All is settled before anyone is let in, but for generation,
    policies, since and restored: they are replaced whenever a generation is formed.

    Attributes:
        run_id: names the run over all its generations.
        job_path: the job file as the user gave it.
        overrides: ``key=value``, in order.
        token: what a process must find in the run directory to prove that it shares it.
        generation: the one that was formed last; 0 before the first of the run.
        policies: those that it has followed after its first, oldest first; the last one stands.
        first: the policy that it began with, where that is not the one that the job says now.
        since: the generation since which all shards have kept what they held.
        restored: what all shards restored when this generation was formed; None if some kept
            theirs, or began with nothing.
        remarks: what a person should know of how it was settled.
        counted_twice: batches that may have counted twice on parts of the parameters, since it was
            resumed with another number of shards.
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

    @property
    def followed(self) -> tuple[Followed, ...]:
        """All policies that it has followed, the first one with them."""
        return (Followed(1, self.first or self.description.policy), *self.policies)

    @property
    def policy(self) -> int:
        """The number of the policy that stands; raised by each change."""
        return self.followed[-1].number

    @property
    def settings(self) -> Policy:
        """The policy that stands."""
        return self.followed[-1].settings

    @property
    def rule(self) -> Rule | None:
        """What the job goes over to by itself, as long as it has followed its first policy only."""
        return None if self.policies else self.description.then

    @property
    def rate_scale(self) -> float:
        """What the learning rate is multiplied by once it is warm: k, the micro-batches of an
        update (Goyal et al. 2017, section 2.1), and what it was reduced to."""
        return self.micro_batches * self.followed[-1].rate

    @property
    def micro_batches(self) -> float:
        """k; 1 where the job does not scale its learning rate."""
        return float(self.settings.taken) if self.description.scale_lr == "linear" else 1.0

    @property
    def warmup_updates(self) -> int:
        """Updates of the optimizer until then."""
        if self.micro_batches == 1.0:
            return 0
        description = self.description
        per_epoch = updates(self.settings, 0, description.per_epoch, description.per_epoch)
        return round(description.warmup_epochs * per_epoch)

    @property
    def settings_sha256(self) -> str:
        """Hex; of what a worker loads besides the job file, which a resumed run may change."""
        job = self.description
        settings = [self.overrides, job.mode, job.replicas, job.data_fingerprint]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    @property
    def first_attempt(self) -> int:
        """Attempts are unique in a job: each generation counts from its own start."""
        return (max(0, self.generation - 1) << 40) + 1


__all__ = ["Followed", "RestoredCheckpoint", "Run"]
