"""The work of one run: combines batches, rounds, snapshots and evaluations.

Deterministic: time is passed in, commands go out through ``send``. The only other side effects are
on the store and the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.checkpoints.cadence import Cadence
from coordinator.checkpoints.disk import DiskWork
from coordinator.checkpoints.orders import Orders
from coordinator.core.run import Run
from coordinator.core.work import Report, TrainingPosition, TrainingWork, Wait
from coordinator.membership.progress import Progress
from coordinator.records.curves import Curves
from coordinator.records.epochs import EpochHistory
from coordinator.records.notes import JobWarnings, Notes
from coordinator.records.store import Store
from coordinator.schedule.ledger import Ledger
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.rounds import Rounds
from coordinator.training.awaited import AwaitedOrders
from coordinator.training.decisions import Decisions
from coordinator.training.epochs import Epochs
from coordinator.training.initial_work import InitialWork
from coordinator.training.step_watch import StepWatch
from psrpc.core.commands import Attempt, Command
from psrpc.core.errors import InvalidArgument
from psrpc.core.shard_reports import Positions
from psrpc.ops.clock import Clock


class Training:
    """The work of a run, done and to do. :meth:`begin` rebuilds it for each generation; notes,
    counters, the watch over steps, warnings and the ``limit`` of an attended job stay. ``failure``
    says why the job must stop."""

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
        attended: bool = False,
    ) -> None:
        """``send`` reaches every shard; ``clock`` times checkpoints; ``history`` is the file of all
        epochs, or None; an ``attended`` job trains nothing before :meth:`allow`."""
        self._store, self._send, self._disk = store, send, disk
        self.cadence = Cadence(run.description.checkpoint_every, clock)
        self.progress = Progress()
        self.tally = Tally()
        self._warnings = warnings
        self.notes = Notes(store, warnings)
        self.watch = StepWatch(run.settings, self.notes, curves, warnings, attended)
        self.schedule: Ledger | Rounds | None = None
        self.limit = 0 if attended else None
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
            attended,
        )
        self.decisions = Decisions(store, send, warnings, self.progress, self.epochs, self.watch)
        self._awaited = AwaitedOrders(send)
        self._at_outset = False
        """Whether the generation's initial state awaits evaluation, and no decision that could
        carry the order has been made yet."""

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
        begins = TrainingPosition(0, self.run.description.total_updates, 0, 0, 0)
        return begins if self.schedule is None else self.schedule.span

    @property
    def idle(self) -> bool:
        """Whether no worker holds unfinished work and no decision waits for the disk."""
        return (self.schedule is None or self.schedule.idle) and not self.decisions.waits

    @property
    def drained(self) -> bool:
        """Whether draining is complete: nothing is in flight or will be, so all shards agree."""
        return self.schedule is not None and self.schedule.drained and not self.decisions.waits

    def begin(
        self, run: Run, applied: Sequence[Positions], skipped: Sequence[Positions], version: int
    ) -> None:
        """Starts the generation of ``run``, which all shards have begun. ``applied`` and
        ``skipped`` are their applied-sets and the skipped part of them, per shard and epoch; a
        batch that all shards have is done. ``version`` is the shards' version, in rounds. Raises
        sqlite3.Error, if the store cannot be read; nothing has changed then."""
        orders = self._new_orders(run)
        outset = InitialWork.of(applied, skipped)
        schedule = outset.schedule(run, version, self.tally, self.limit)
        self._at_outset = self.epochs.begin(run, orders, schedule, bool(outset.partial))
        self.run, self.orders, self.schedule = run, orders, schedule
        self.watch.follow(run.settings)
        self.decisions.begin()
        self._awaited.begin()
        self.progress.skipped = outset.batches_skipped(run)

    @property
    def held(self) -> bool:
        """Whether all batches below the limit of an attended job are done, and nothing is in
        flight."""
        return self.schedule is not None and self.schedule.held and not self.decisions.waits

    def allow(self, limit: int) -> None:
        """Lets an attended job, which holds, train until ``limit`` batches are done."""
        assert self.schedule is not None
        self.limit = limit
        self.schedule.allow(limit)

    def drain(self) -> None:
        """Stops leasing new work in this generation; work in flight is finished."""
        if self.schedule is not None:
            self.schedule.drain()

    def halt(self) -> None:
        """Ends the generation: decides no more rounds and gives up ordered snapshots."""
        self.decisions.halt()
        self.orders.give_up()

    def retry(self, now: float) -> None:
        """Retries the stores and saves that the disk refused, and looks for stragglers. Call it
        periodically."""
        self._awaited.look(self.ledger)
        if self.schedule is not None and not self.decisions.over:
            self.schedule.tick(now)
            if not self.epochs.over:
                self.orders.saving.look(self.span.step)
            self.epochs.retry()
        self.orders.saving.final.retry(now)
        self.notes.retry()
        if self.rounds is not None:
            self.decisions.retry(self.rounds, self.orders, now)

    def lease(
        self,
        worker: str,
        now: float,
        received: int,
        workers: int,
        ahead: bool = False,
        clocks: bool = False,
        devices: int = 1,
    ) -> TrainingWork:
        """Leases work, or returns why to wait; see ``coordinator.job.engine.Caller``."""
        assert self.schedule is not None
        if self.rounds is not None:
            self.rounds.ahead.crew.asks(worker, ahead, devices)
            if not self._at_outset and self.orders.evaluations.idle:
                waits = self.decisions.look_ahead(self.rounds, self.orders, now)
                if waits:
                    return Wait(waits)
        if self.ledger is not None:
            asked = worker, now, received, workers, clocks, devices
            work: TrainingWork = self.ledger.lease(*asked)
            self._awaited.look(self.ledger)
        else:
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
        self._awaited.look(self.ledger)

    def revoke(self, worker: str, lost: bool) -> list[Attempt]:
        """Returns the uncommitted attempts of a departed ``worker``; others get the batches only
        after :meth:`release`. The batches count as failed if it is ``lost``, not if it returned
        them. Its evaluations change nothing on a shard, so other workers may take them at once."""
        attempts = self.schedule.revoke(worker) if self.schedule else []
        self.progress.failed += len(attempts) if lost else 0
        self.progress.left(worker)
        self._awaited.look(self.ledger)
        self.orders.evaluations.release(worker)
        return attempts

    def release(self, worker: str) -> int:
        """Reopens the batches of ``worker``, which no shard serves any more; returns how many."""
        return self.schedule.release(worker) if self.schedule else 0

    def record(self, worker: str, reports: Sequence[Report], now: float) -> None:
        """Records batches that are done on all shards: in async mode, and of rounds that were
        decided ahead. Raises InvalidArgument."""
        if self.rounds is not None and not self.decisions.over:
            for report in self.rounds.report(worker, reports, now):
                self._batch_done(worker, report, now)
            self.decisions.decide(self.rounds, self.orders, now)
        if self.ledger is None:
            return
        before = self.ledger.span.step
        counted = self.ledger.report(worker, reports, now)
        self._awaited.look(self.ledger)
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
        if self.decisions.over:
            return
        if rounds.commit(worker, round_number, report, now) is None:
            self.progress.in_vain(worker, report)
            return
        self._batch_done(worker, report, now)
        self.decisions.decide(rounds, self.orders, now)

    def order_due(self) -> None:
        """Orders the snapshots that are due and that no decision carries."""
        if self.decisions.held:
            return
        waits = self.epochs.awaited is not None
        outset, self._at_outset = self._at_outset, False
        over, still = self.epochs.over, self.drained or self.held
        if self.rounds is None or over or self.decisions.closed or still or waits or outset:
            self.orders.order_due(self.span.step, over)
        self._warnings.take(self.orders)

    def close(self) -> None:
        """Stops deciding, so that the final state can be saved. Async: the next generation repeats
        pushes that are still in flight."""
        self.decisions.close(self.orders)

    def missed(self, shard: int) -> list[Command]:
        """Returns the commands that a shard may have missed while it had no command stream."""
        missed = self._awaited.missed(self.ledger)
        if self.rounds is not None:
            # Decisions may order snapshots; the shard needs the room of those released before.
            missed += self.orders.releases if self.rounds.decisions else []
            missed += [*self.rounds.decisions, *self.decisions.missed(self.rounds)]
        return missed + self.orders.missed(shard)

    def hold(self, worker: str) -> bool:
        """Stops deciding rounds in this generation if a departed ``worker`` has an attempt in a
        round that was decided ahead; returns whether it has. Another generation must then begin
        once no shard applies any such round, see :mod:`coordinator.schedule.decided_ahead`."""
        return self.rounds is not None and self.decisions.hold(self.rounds, worker)

    def _new_orders(self, run: Run) -> Orders:
        return Orders(run, self._store.newest_checkpoint(), self._disk, self._send, self.cadence)

    def waiting_for(self) -> str:
        """Names the event that the next step waits for; empty when there is work."""
        return self.epochs.waiting_for() or (self.schedule.waiting_for() if self.schedule else "")

    def _batch_done(self, worker: str, report: Report, now: float) -> None:
        self.progress.done(worker, report, now)
        self.watch.batch_done(worker, report)
