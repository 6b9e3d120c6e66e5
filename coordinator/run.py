"""One run of a job: what is settled before anyone is let in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.description import JobDescription
from coordinator.saving import CHECKPOINTS
from psrpc.plan import Plan


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
class Run:
    """The facts that do not change while the coordinator serves.

    Attributes:
        run_id: names the run over all its generations.
        job_path: the job file as the user gave it.
        overrides: ``key=value``, in order.
        token: what a process must find in the run directory to prove that it shares it.
        generation: raised by each resume.
        policy: raised by each change of the mode.
        restored: where to go on from, None for a fresh start.
    """

    run_id: str
    run_dir: Path
    job_path: str
    overrides: tuple[str, ...]
    token: str
    description: JobDescription
    plan: Plan
    generation: int = 1
    policy: int = 1
    restored: Restored | None = None

    @property
    def first_attempt(self) -> int:
        """Attempts are unique in a job: each generation counts from its own start."""
        return (self.generation - 1 << 40) + 1
