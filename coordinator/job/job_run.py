"""One run of a job: its phase, the work of each worker, and the reasons for which it waits.

Nothing here blocks or awaits: callers pass in the time, and ``disk`` does slow work and calls back.
Everything runs on one event loop, so there is no lock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.checkpoints.disk import DiskWork
from coordinator.core.lifecycle import ENDED, ENDED_EARLY, STOPPED, Facts, Phase, next_phase
from coordinator.core.run import Run
from coordinator.core.work import Report
from coordinator.membership.members import WorkerSilent
from coordinator.membership.recovery import went_back
from coordinator.records.curves import Curves
from coordinator.records.store import Store
from coordinator.training.gauges import read_gauges
from coordinator.training.job_state import JobState
from coordinator.transitions.changes import Changes
from coordinator.transitions.checkpointing import Checkpointing
from coordinator.transitions.departures import Departures
from coordinator.transitions.holding import Holding
from coordinator.transitions.stopping import DRAINED, Stopping
from coordinator.transitions.stuck import Stuck
from coordinator.transitions.waits import Assignments, JobWaits, held_up, waiting_for
from psrpc.core.errors import StaleGeneration
from psrpc.ops.clock import Clock
from psrpc.ops.logs import get_logger

log = get_logger()


class JobRun(JobState):
    """One run of a job from its first shard to its end. ``bell`` rings at every change."""

    def __init__(
        self,
        run: Run,
        store: Store,
        clock: Clock,
        disk: DiskWork,
        curves: Curves | None = None,
        at_end: Callable[[], object] = lambda: None,
        history: Path | None = None,
        attended: bool = False,
    ) -> None:
        """``history`` is the file of all epochs, None for none. ``at_end`` runs when the job is
        over, before the store records that, so the store's record implies its effects. An
        ``attended`` job holds before it trains, see :class:`Holding`."""
        self._curves = curves or Curves(run.run_dir / "tensorboard")
        super().__init__(run, store, clock, disk, self._curves, history, self.advance, attended)
        self.began = clock.now()
        self._store = store
        self._at_end = at_end
        self._waits = JobWaits()
        self.checkpoints = Checkpointing(self, disk, store.newest_checkpoint(), self.advance)
        self.holding = Holding(
            self,
            disk,
            lambda: self.checkpoints.newest,
            lambda: self.changes.switch is not None,
            self.advance,
        )
        self.departures = Departures(self, run.plan.shards, self.advance)
        self.stuck = Stuck(self, self.departures.dismiss)
        self.changes = Changes(self, self.advance, self.waiting_for, self.fail)
        self.assignments = Assignments(self, self.stuck, self.waiting_for)
        self.stopping: Stopping | None = None

    # Time, and the end.

    def tick(self) -> None:
        """Handles the passage of time: silent members, waits, and curves to write."""
        now = self.now()
        for effect in self.members.tick(now):
            # Only logged, not a warning: the status names members while they are silent.
            log.warning("silent", why=effect.reason)
            if isinstance(effect, WorkerSilent):
                self.departures.worker_silent(effect.worker)
        self.stuck.look(now)
        self.training.retry(now)
        gauges = read_gauges(self)
        self.training.progress.saw_skew(gauges.version_skew)
        self._curves.flush(gauges)
        self.training.epochs.history.write(now)
        self._waits.look(self.held_up(), now)
        self.advance()

    def fail(self, reason: str, phase: Phase = "failed") -> None:
        """Ends the job for all processes."""
        if self.phase not in ENDED:
            self.reason = reason
            self._enter(phase, reason)

    def stop(self) -> None:
        """Stops the job for a user, once the work under way is finished and saved; a second call
        stops at once. If the coordinator is draining, it ends the run when it leaves."""
        if self.drained:
            return
        if self.stopping is not None and self.stopping.drains:
            log.info("the run ends, and does not go on", why=STOPPED)
            self.stopping.drains = False
        elif self.stopping is not None or not self._goes_on:
            self.fail(STOPPED)
        else:
            self._stop(Stopping(self.now()), STOPPED)

    def end_early(self) -> None:
        """Ends a job that trains as done, once the work under way is finished and saved."""
        if self.phase == "training" and self.stopping is None:
            self._stop(Stopping(self.now(), early=True), ENDED_EARLY)

    def drain(self) -> None:
        """Makes the coordinator leave, once the work under way is finished and saved; the next one
        continues the run. A second call leaves at once. Does nothing to a job that stops."""
        if self.phase in ENDED:
            return
        if self.stopping is None and self._goes_on:
            self._stop(Stopping(self.now(), drains=True), DRAINED)
        elif self.stopping is None or self.stopping.drains:
            self._leave()

    @property
    def _goes_on(self) -> bool:
        """Whether there is a state of training to save."""
        return self.phase in ("training", "finishing") or self.generations.again

    def _stop(self, stopping: Stopping, reason: str) -> None:
        self.stopping = stopping
        self._enter("stopping", reason)
        self.advance()

    def _leave(self) -> None:
        """Leaves without storing anything, as if killed just after a checkpoint."""
        self.drained = True
        self.bell.ring()

    def close(self) -> None:
        """Writes the remaining history and curves; no call may follow."""
        self.training.epochs.history.write()
        self._curves.close()

    @property
    def waited_s(self) -> float:
        """Seconds for which the job has been held up; 0 if it is not."""
        return self._waits.waited_s(self.now())

    @property
    def everyone_knows(self) -> bool:
        """Whether all connected shards, workers and the attendant know that the job is over."""
        present = self.members.places.present(self.now()) or self.members.active_workers
        return self.holding.told and not present

    def note_process(self, role: str, member: str, incarnation: int, address: str) -> None:
        """Stores that a process has registered, for the next coordinator of the run."""
        try:
            self._store.put_incarnation(role, member, incarnation, self.run.generation, address)
        except sqlite3.Error as error:
            self.warnings.add(f"{role} {member} cannot be stored: {error}")

    # Work.

    def check_standing(self, generation: int) -> None:
        """Raises StaleGeneration unless all shards have begun this generation and no later one."""
        self.check_generation(generation)
        if not self.complete:
            awaited = self.waiting_for() or "another"
            raise StaleGeneration(f"generation {generation} is over; the job waits for {awaited}")

    def waiting_for(self) -> str:
        """Names the events that the job waits for; empty while it waits for none."""
        return waiting_for(
            self, self.stopping, self.changes, self.holding, self.stuck, self.departures
        )

    def held_up(self) -> str:
        """Names the events that hold the job up; empty while workers finish batches."""
        return held_up(self, self.waiting_for())

    def record(self, name: str, reports: Sequence[Report]) -> None:
        """Async: records batches that ``name`` has done. Raises InvalidArgument."""
        if reports and self.phase not in ENDED:
            self.training.record(name, reports, self.now())
            self.departures.worker_done(name)
            self.advance()

    def commit(self, name: str, round_number: int, report: Report) -> None:
        """Sync: commits an attempt of ``name`` that all shards hold. Raises InvalidArgument."""
        if self.phase not in ENDED:
            self.training.commit(name, round_number, report, self.now())
            self.departures.worker_done(name)
            self.advance()

    def initialized(self) -> None:
        """Records that a worker has given every shard its parameters."""
        if self.phase == "initializing":
            self.generations.formation.initialize()
            self.advance()

    def holds_attempt(self, name: str) -> bool:
        """Sync: whether shards may have staged an uncommitted attempt of ``name``."""
        rounds = self.training.rounds
        return self.complete and rounds is not None and rounds.holds(name)

    # Phases.

    def advance(self) -> None:
        """Moves the job on as far as its state allows, and wakes parked calls."""
        ends = self.phase in ENDED or (self.phase == "stopping" and not self.generations.again)
        if not ends and self.generations.form_if_due():
            self.departures.begin()
        self.warnings.take(self.generations)
        self.warnings.take(self._curves)
        if self.phase in ("training", "finishing"):
            self.training.order_due()
        if self.phase == "training" and self.complete:
            self.changes.advance()
        if self.phase in ("training", "finishing") and self.complete:
            self.holding.advance()
        failure = self.training.failure or self.generations.failure
        if failure:
            self.fail(failure)
        if self.generations.formation.complete and self.begun != self.run.generation:
            self._begin()
        saving = self.training.orders.saving
        facts = Facts(
            begun=self.complete,
            initialized=self.generations.formation.initialized,
            saved=saving.first_saved,
            trained=self.training.epochs.over,
            final_saved=saving.final.saved,
            final_evaluated=saving.final_evaluated and self.holding.ends,
        )
        transition = next_phase(self.phase, facts)
        if transition is not None:
            self._enter(transition.phase, transition.reason)
            self.advance()
        elif self.phase == "initializing" and facts.initialized:
            self.training.orders.order_first(self.training.span.step)
        elif (
            self.phase == "stopping"
            and self.stopping is not None
            and self.stopping.over(self, self.checkpoints.newest)
        ):
            if self.stopping.drains:
                self._leave()
            else:
                self.fail(*self.stopping.end)
        self.bell.ring()

    def _begin(self) -> None:
        standings, before = self.generations.standings, self.training.span.step
        try:
            self.generations.note_restored()
            self.training.begin(
                self.run,
                [s.applied for s in standings],
                [s.skipped for s in standings],
                max(s.holding.version for s in standings),
            )
        except sqlite3.Error as error:
            self.generations.cannot(f"generation {self.run.generation} to begin", error)
            return
        self.begun = self.run.generation
        self.training.epochs.take_totals(standings[0].totals)
        self.checkpoints.restored(self.generations.source)
        lost = went_back(self.begun, before, self.training.span.step, self.generations.source)
        if lost:
            self.warnings.add(lost)
        self.initializer = None
        self.changes.begin()
        self.holding.begin()
        log.info("generation begun", generation=self.begun, step=self.training.span.step)

    def _enter(self, phase: Phase, reason: str) -> None:
        log.info("phase", phase=phase, why=reason)
        self.phase = phase
        if phase == "recovering":
            self.training.halt()
        if phase in ("finishing", "stopping", *ENDED):
            self.changes.drop()
        stopped = self.training.epochs.stopped
        if phase == "done" and stopped is not None:
            self.reason = stopped.reason
        if phase in ENDED:
            self.training.epochs.history.write()
            self._at_end()
            try:
                self._store.put(*self.changes.end(phase))
            except sqlite3.Error as error:
                self.warnings.add(f"that the job has ended cannot be stored: {error}")
            self.streams.send(self.end())
            self.bell.ring()
