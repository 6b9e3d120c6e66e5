"""The work of one run: combines batches, rounds, snapshots and evaluations.

Deterministic: time is passed in, commands go out through ``send``. The only other side effects are
on the store and the disk; a round's decision is stored before it is sent.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.checkpoints.cadence import Cadence
from coordinator.checkpoints.disk import DiskWork
from coordinator.checkpoints.orders import Orders
from coordinator.core.run import Run
from coordinator.core.work import Report, TrainingPosition, TrainingWork, Wait
from coordinator.membership.progress import Progress, mean_loss
from coordinator.records.curves import Curves
from coordinator.records.epochs import EpochHistory
from coordinator.records.notes import JobWarnings, Notes
from coordinator.records.store import Store
from coordinator.schedule.initial_work import InitialWork
from coordinator.schedule.ledger import Ledger
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.rounds import Rounds
from coordinator.training.epochs import Epochs
from coordinator.training.step_watch import StepWatch
from psrpc.core.commands import Attempt, Command, Decision, RoundsAhead
from psrpc.core.errors import InvalidArgument
from psrpc.core.shard_reports import Positions
from psrpc.ops.clock import Clock


class Training:
    """The work of a run, done and to do. :meth:`begin` rebuilds it for each generation; notes,
    counters, the watch over steps and warnings stay. ``failure`` says why the job must stop."""

    def __init__(
        self,
        run: Run,
        store: Store,
        curves: Curves,
        send: Callable[[Command], None],
        disk: DiskWork,
        warnings: JobWarnings,
        clock: Clock,
        history: Path | None = None,
    ) -> None:
        """``send`` reaches every shard; ``clock`` times checkpoints; ``history`` is the file of all
        epochs, or None."""
        self._store = store
        self._send = send
        self._disk = disk
        self._cadence = Cadence(run.description.checkpoint_every, clock)
        self.progress = Progress()
        self.tally = Tally()
        self._warnings = warnings
        self.notes = Notes(store, warnings)
        self.watch = StepWatch(run.settings, self.notes, curves, warnings)
        self.schedule: Ledger | Rounds | None = None
        self.run = run
        self.orders = self._new_orders(run)
        self.epochs = Epochs(
            run,
            self.orders,
            EpochHistory(history, store, self.notes.store_soon, warnings),
            self.notes,
            self.progress,
            curves,
            warnings,
        )
        self._undecided: Decision | RoundsAhead | None = None
        """A decision that waits for the disk."""
        self._closed = False
        self._held = False
        """Whether the generation ends as soon as no shard applies a round any more."""
        self._at_outset = False
        """Whether the state that the generation began with awaits evaluation, and no decision has
        come yet that could carry the order."""

    @property
    def failure(self) -> str | None:
        """Why the job must stop, or None."""
        return self.watch.failure or self.orders.failure

    @property
    def ledger(self) -> Ledger | None:
        """The schedule of async training, once it has begun."""
        return self.schedule if isinstance(self.schedule, Ledger) else None

    @property
    def rounds(self) -> Rounds | None:
        """The schedule of sync training, once it has begun."""
        return self.schedule if isinstance(self.schedule, Rounds) else None

    @property
    def span(self) -> TrainingPosition:
        """The training position."""
        if self.schedule is not None:
            return self.schedule.span
        return TrainingPosition(0, self.run.description.total_updates, 0, 0, 0)

    @property
    def idle(self) -> bool:
        """Whether no worker holds unfinished work and no decision waits for the disk."""
        leased = self.schedule is not None and not self.schedule.idle
        return not leased and self._undecided is None

    @property
    def drained(self) -> bool:
        """Whether nothing is in flight, nor will be, since :meth:`drain`: all shards have the same
        batches, and no decision waits for the disk."""
        return self.schedule is not None and self.schedule.drained and self._undecided is None

    def begin(
        self, run: Run, applied: Sequence[Positions], skipped: Sequence[Positions], version: int
    ) -> None:
        """Starts the generation of ``run``, which all shards have begun. ``applied`` and
        ``skipped`` are their applied-sets and the skipped part of them, per shard and epoch; a
        batch that all shards have is done. ``version`` is the shards' version, in rounds.

        Raises:
            sqlite3.Error: the store cannot be read; nothing has changed.
        """
        orders = self._new_orders(run)
        outset = InitialWork.of(applied, skipped)
        schedule = outset.schedule(run, version, self.tally)
        self._at_outset = self.epochs.begin(run, orders, schedule, bool(outset.partial))
        self.run, self.orders, self.schedule = run, orders, schedule
        self.watch.follow(run.settings)
        self._undecided, self._closed, self._held = None, False, False
        self.progress.skipped = outset.batches_skipped(run)

    def drain(self) -> None:
        """Stops leasing new work in this generation; work in flight is finished."""
        if self.schedule is not None:
            self.schedule.drain()

    def halt(self) -> None:
        """Ends the generation: decides no more rounds and gives up what was ordered."""
        self._closed, self._undecided = True, None
        self.orders.give_up()

    def retry(self, now: float) -> None:
        """Retries the stores and saves that the disk refused, and looks for stragglers. Call it
        periodically."""
        if self.schedule is not None and not (self._closed or self._held):
            self.schedule.tick(now)
            if not self.epochs.over:
                self.orders.saving.look(self.span.step)
            self.epochs.retry()
        self.orders.saving.final.retry(now)
        self.notes.retry()
        if isinstance(self._undecided, RoundsAhead):
            self._store_ahead()
        elif self._undecided is not None and self.rounds is not None:
            self._decide(self.rounds, now)

    def lease(
        self, worker: str, now: float, received: int, workers: int, ahead: bool = False
    ) -> TrainingWork:
        """Leases training work to ``worker``, or says what it waits for. ``ahead``: it can compute
        rounds that are decided ahead."""
        assert self.schedule is not None
        if self.rounds is not None:
            self.rounds.ahead.crew.asks(worker, ahead)
            self._look_ahead(self.rounds, now)
            if isinstance(self._undecided, RoundsAhead):
                return Wait("the decisions of the next rounds to be stored")
        if self._held:
            return Wait("another generation to begin")
        work = self.schedule.lease(worker, now, received, workers)
        if isinstance(work, Wait):
            awaited = self.epochs.waiting_for()
            return Wait(awaited) if awaited else work
        self.progress.leased(worker, now)
        return work

    def idle_worker(self, worker: str) -> None:
        """Notes that ``worker`` does something other than training, so nothing waits for it."""
        if self.schedule is not None:
            self.schedule.idle_worker(worker)

    def revoke(self, worker: str, lost: bool) -> list[Attempt]:
        """Returns what a departed ``worker`` holds uncommitted; other workers get it only after
        :meth:`release`. Its batches count as failed if it is ``lost``, not if it returned them.
        Its evaluations change nothing on a shard, so other workers may take them at once."""
        attempts = self.schedule.revoke(worker) if self.schedule else []
        self.progress.failed += len(attempts) if lost else 0
        self.progress.left(worker)
        self.orders.evaluations.release(worker)
        return attempts

    def release(self, worker: str) -> int:
        """Reopens the batches of ``worker``, from which no shard takes anything any more; returns
        how many."""
        return self.schedule.release(worker) if self.schedule else 0

    def record(self, worker: str, reports: Sequence[Report], now: float) -> None:
        """Records batches that are done on all shards: in async mode, and of rounds that were
        decided ahead. Raises InvalidArgument."""
        if self.rounds is not None:
            self._record_ahead(self.rounds, worker, reports, now)
        if self.ledger is None:
            return
        before = self.ledger.span.step
        counted = self.ledger.report(worker, reports, now)
        for report in reports:
            if report.too_stale:
                self.progress.in_vain(worker, report)
        self.progress.stepped(len(counted), now)
        for step, report in enumerate(counted, before + 1):
            self._batch_done(worker, report, now)
            if not report.skipped:
                self.watch.step_done(step, report.loss, report.staleness)
        if counted:
            after = self.ledger.span.step
            finished = self.ledger.take_finished_epochs()
            self.orders.saving.stepped(before, after, finished)
            self.epochs.finished(finished, after)

    def commit(self, worker: str, round_number: int, report: Report, now: float) -> None:
        """Sync: commits an attempt that all shards hold; decides the round if it was the last.

        Raises:
            InvalidArgument: the job is not synchronous, or the attempt is unknown.
        """
        rounds = self.rounds
        if rounds is None:
            raise InvalidArgument("this job is async: batches are reported with LeaseWork")
        if self._closed or self._held:
            return
        if rounds.commit(worker, round_number, report, now) is None:
            self.progress.in_vain(worker, report)
            return
        self._batch_done(worker, report, now)
        if rounds.complete:
            self._decide(rounds, now)

    def order_due(self) -> None:
        """Orders the snapshots that are due and that no decision carries."""
        if self._held:
            return
        waits = self.epochs.awaited is not None
        outset, self._at_outset = self._at_outset, False
        over = self.epochs.over
        if self.rounds is None or over or self._closed or self.drained or waits or outset:
            self.orders.order_due(self.span.step, over)
        self._warnings.take(self.orders)

    def close(self) -> None:
        """Stops deciding, so that the final state can be saved. Async: the next generation repeats
        pushes that are still in flight."""
        if isinstance(self._undecided, Decision):
            self.orders.withdraw(self._undecided.snapshots)
        self._closed, self._undecided = True, None

    def missed(self, shard: int) -> list[Command]:
        """Returns the commands that a shard may have missed without a command stream."""
        missed: list[Command] = []
        if self.rounds is not None and self.rounds.decisions:
            # Decisions may order snapshots, for which the shard needs room.
            missed = [*self.orders.releases, *self.rounds.decisions]
        if self.rounds is not None and self.rounds.ahead and self._sends_ahead:
            missed.append(self.rounds.ahead.decisions)
        return missed + self.orders.missed(shard)

    def hold(self, worker: str) -> bool:
        """Decides no more rounds in this generation if some were decided ahead in which a departed
        ``worker`` has an attempt; returns whether that is so. Another generation has to begin once
        no shard applies any of them, see :mod:`coordinator.schedule.decided_ahead`."""
        held = self.rounds is not None and bool(self.rounds.ahead.held_by([worker]))
        self._held = self._held or held
        return held

    def _look_ahead(self, rounds: Rounds, now: float) -> None:
        """Decides rounds ahead if that is possible."""
        saving = self.orders.saving
        busy = self._undecided is not None or self._closed or self._held or saving.owes
        if busy or self._at_outset or not self.orders.evaluations.idle:
            return
        # The decision of the round that ends at a checkpoint's step carries its order.
        ends_at = saving.orders_at(rounds.round)
        before = None if ends_at is None else ends_at - 1
        self._undecided = rounds.look_ahead(before, self.progress.speeds(), now)
        self._store_ahead()

    @property
    def _sends_ahead(self) -> bool:
        return not self._held and not isinstance(self._undecided, RoundsAhead)

    def _store_ahead(self) -> None:
        decided = self._undecided
        if isinstance(decided, RoundsAhead) and self._stored(decided):
            self._undecided = None
            self._send(decided)

    def _record_ahead(
        self, rounds: Rounds, worker: str, reports: Sequence[Report], now: float
    ) -> None:
        if self._closed or self._held:
            return
        for report in rounds.report(worker, reports, now):
            self._batch_done(worker, report, now)
        if rounds.complete:
            self._decide(rounds, now)

    def _decide(self, rounds: Rounds, now: float) -> None:
        if isinstance(self._undecided, RoundsAhead):
            # The decisions of later rounds wait for the disk.
            self._store_ahead()
            if self._undecided is not None:
                return
        step, opened = rounds.round + 1, rounds.ahead.opened
        if opened is not None:
            decision = opened.decision
            self.orders.saving.stepped(rounds.round, step, [])
        elif self._undecided is None:
            trained = rounds.ends_job
            ended = [rounds.span.epoch] if rounds.ends_epoch else []
            self.orders.saving.stepped(rounds.round, step, ended)
            decision = rounds.decide(self.orders.with_decision(step, trained))
            self._undecided = decision
        else:
            decision = self._undecided
        if opened is None and not self._stored(decision):
            return
        self._undecided = None
        reports = rounds.reports()
        rounds.close(decision)
        if opened is None:
            self._send(decision)
        if any(not report.skipped for report in reports):
            self.watch.step_done(step, mean_loss(reports), 0)
        self.progress.stepped(1, now)
        self.epochs.finished(rounds.take_finished_epochs(), step)
        self._warnings.take(self.orders)
        if rounds.complete and not self._closed:
            # Its commits came while the previous decision waited for the disk.
            self._decide(rounds, now)

    def _stored(self, decided: Decision | RoundsAhead) -> bool:
        """Stores a decision, as it must be before it is sent: a restarted coordinator must not
        decide otherwise."""
        try:
            if isinstance(decided, Decision):
                self._store.put_decision(decided)
            else:
                self._store.put_ahead(decided)
        except sqlite3.Error as error:
            first = decided if isinstance(decided, Decision) else decided.decisions[0]
            self._warnings.add(f"round {first.round} waits: its decision cannot be stored: {error}")
            return False
        return True

    def _new_orders(self, run: Run) -> Orders:
        return Orders(run, self._store.newest_checkpoint(), self._disk, self._send, self._cadence)

    def waiting_for(self) -> str:
        """Says what the next step waits for; empty when there is work."""
        awaited = self.epochs.waiting_for()
        return awaited or (self.schedule.waiting_for() if self.schedule is not None else "")

    def _batch_done(self, worker: str, report: Report, now: float) -> None:
        self.progress.done(worker, report, now)
        self.watch.batch_done(worker, report)
