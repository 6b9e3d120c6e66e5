"""The facts about a run that the parts of a job share: members, generation, training, phase.

The parts read these facts and do not know each other: one part triggers another through a function
that :class:`coordinator.job.job_run.JobRun` hands to it. Used from one event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coordinator.checkpoints.disk import DiskWork
from coordinator.core.lifecycle import FORMING, STOPPED, Phase
from coordinator.core.run import Run
from coordinator.membership.membership import LEASE_S, known_members
from coordinator.records.curves import Curves
from coordinator.records.notes import JobWarnings
from coordinator.records.store import Store
from coordinator.records.stored_values import BARRED
from coordinator.training.generations import Generations
from coordinator.training.streams import CommandStreams, Notifier
from coordinator.training.training import Training
from psrpc.core.commands import Ended
from psrpc.core.errors import StaleGeneration
from psrpc.ops.clock import Clock


class JobState:
    """The present facts about a run.

    Attributes:
        phase: of the job; ``reason`` says why it failed or ended early, and is empty before.
        begun: the generation that training was rebuilt for.
        drained: whether this coordinator must leave a run that has not ended.
        initializer: the worker that initializes the shards, or None.
        bell: rings at every change.
    """

    def __init__(
        self,
        run: Run,
        store: Store,
        clock: Clock,
        disk: DiskWork,
        curves: Curves,
        history: Path | None,
        advance: Callable[[], None],
        attended: bool = False,
    ) -> None:
        """``advance`` moves the job on as far as its state allows; ``history`` is the file of all
        epochs, or None; an ``attended`` job holds before it trains."""
        self.members = known_members(
            run.plan.shards,
            LEASE_S,
            store.incarnations("shard"),
            store.incarnations("worker"),
            store.get(BARRED),
        )
        self.phase: Phase = "recovering" if run.generation else "waiting"
        self.reason = ""
        self.begun = 0
        self.drained = False
        self.initializer: str | None = None
        self.bell = Notifier()
        self.streams = CommandStreams(run.plan.shards)
        self.warnings = JobWarnings()
        self.warnings.add(*run.remarks, *run.description.remarks)
        self.training = Training(
            run,
            store,
            curves,
            self.streams.send,
            disk,
            self.warnings,
            clock,
            history,
            attended,
        )
        self.generations = Generations(run, store, disk, self.streams.send_to, advance)
        self._clock = clock

    def now(self) -> float:
        """Returns monotonic time, in seconds."""
        return self._clock.now()

    @property
    def run(self) -> Run:
        """The run, as of the present generation."""
        return self.generations.run

    @property
    def complete(self) -> bool:
        """Whether all shards have begun the present generation, so that training is possible."""
        return self.generations.formation.complete and self.begun == self.run.generation

    @property
    def standing(self) -> tuple[int, int]:
        """Generation and global step for observers; together they never go back. While a generation
        is formed they are those of the previous one, if known."""
        if self.begun:
            return self.begun, self.training.span.step
        run = self.run
        if not self.generations.formed:
            return run.generation + 1, 0
        return run.generation, run.restored.global_step if run.restored else 0

    @property
    def epoch(self) -> int:
        """The epoch in training, from 1 as in evaluations, the last one once all are done; 0 before
        training begins, and while a restarted coordinator does not know it."""
        return min(self.training.span.epoch + 1, self.run.description.epochs) if self.begun else 0

    @property
    def restored(self) -> str:
        """The name of the checkpoint that shards restore, or restored for the present generation;
        empty if there is none, and before the choice."""
        generations = self.generations
        if self.phase in FORMING:
            return generations.restoring
        return generations.source.rpartition("/")[2]

    def check_generation(self, generation: int) -> None:
        """Raises StaleGeneration unless this is the present generation."""
        if generation != self.run.generation:
            raise StaleGeneration(
                f"the message is of generation {generation}; it is {self.run.generation}"
            )

    def stands(self, generation: int) -> bool:
        """Whether this is the present generation and all shards have begun it, so that training is
        possible."""
        return generation == self.run.generation and self.complete

    def end(self) -> Ended:
        """Returns the last message to every process. A stop by a user, or for another start of the
        whole cluster, is not a failure, so supervisors must not restart a process that ends with
        it; after a job that is done, stopped early or not, processes end with success."""
        failed = self.phase == "failed" and self.reason != STOPPED
        return Ended(failed, self.reason if self.phase in ("failed", "restarting") else "")
