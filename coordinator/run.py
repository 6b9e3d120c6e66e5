"""One run of a job: what is settled before anyone is let in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from coordinator.description import JobDescription
from coordinator.saving import CHECKPOINTS
from psrpc.plan import Plan
from psrpc.policy import Policy


@dataclass(frozen=True)
class Restored:
    """The checkpoint that a run goes on from."""

    name: str
    global_step: int

    @property
    def directory(self) -> str:
        """Relative to the run directory."""
        return f"{CHECKPOINTS}/{self.name}"


@dataclass(frozen=True)
class Followed:
    """A policy that a run came to follow, with the global step and the batches done by then."""

    number: int
    settings: Policy
    step: int = 0
    batches: int = 0


@dataclass(frozen=True)
class Run:
    """What a job's coordinator serves. All but the last four is settled before anyone is let in;
    those are replaced together whenever a generation is formed.

    Attributes:
        run_id: names the run over all its generations.
        job_path: the job file as the user gave it.
        overrides: ``key=value``, in order.
        token: what a process must find in the run directory to prove that it shares it.
        generation: the one that was formed last; 0 before the first of the run.
        policies: those that it has followed after its first, oldest first; the last one stands.
        since: the generation since which all shards have kept what they held.
        restored: what all shards restored when this generation was formed; None if some kept
            theirs, or began with nothing.
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
    restored: Restored | None = None
    policies: tuple[Followed, ...] = ()

    @property
    def policy(self) -> int:
        """The number of the policy that stands; raised by each change."""
        return self.policies[-1].number if self.policies else 1

    @property
    def settings(self) -> Policy:
        """The policy that stands."""
        return self.policies[-1].settings if self.policies else self.description.policy

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
