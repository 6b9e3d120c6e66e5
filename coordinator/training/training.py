"""The work of one run: combines batches, rounds, snapshots and evaluations.

Deterministic: time is passed in, commands go out through ``send``. The only other side effects are
on the store and the disk; a round's decision is stored before it is sent.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coordinator.checkpoints.cadence import Cadence
from coordinator.checkpoints.disk import DiskWork
from coordinator.checkpoints.orders import Orders
from coordinator.checkpoints.snapshots import is_checkpoint
from coordinator.core.plateau import EarlyStop, Review, best_epoch, evaluations_of, review
from coordinator.core.retention import Objective
from coordinator.core.run import Run
from coordinator.core.work import Report, Round, Train, TrainingPosition, Wait
from coordinator.membership.progress import Progress, mean_loss
from coordinator.records.curves import Curves
from coordinator.records.epochs import EpochHistory, EpochRow, first_learning_rate
from coordinator.records.notes import JobWarnings, Notes, NotEvaluated
from coordinator.records.store import Store
from coordinator.schedule.evaluation import TRAINING, epoch_of, training_of
from coordinator.schedule.guard import Guard
from coordinator.schedule.initial_work import InitialWork
from coordinator.schedule.ledger import Ledger
from coordinator.schedule.micro_batch import Tally
from coordinator.schedule.rounds import Rounds
from psrpc.core.batch import LOSS
from psrpc.core.commands import Attempt, Command, Decision
from psrpc.core.errors import InvalidArgument
from psrpc.core.shard_reports import EpochTotals, Positions
from psrpc.ops.clock import Clock
from psrpc.ops.logs import get_logger

log = get_logger()


class Training:
    """The work of a run, done and to do. :meth:`begin` rebuilds it for each generation; notes,
    counters, the guard and warnings stay. ``failure`` says why the job must stop."""

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
        self._curves = curves
        self._send = send
        self._disk = disk
        self._cadence = Cadence(run.description.checkpoint_every, clock)
        self.progress = Progress()
        self.tally = Tally()
        self._failure: str | None = None
        self._warnings = warnings
        self.notes = Notes(store, warnings)
        self.history = EpochHistory(history, store, self.notes.store_soon, warnings)
        self._guard = Guard(run.settings, self.notes.first_loss)
        self.schedule: Ledger | Rounds | None = None
        self.run = run
        self.orders = self._new_orders(run)
        self._undecided: Decision | None = None
        self._closed = False
        self._at_outset = False
        """Whether the state that the generation began with awaits evaluation, and no decision has
        come yet that could carry the order."""
        self._review = Review(run.description.epochs)

    @property
    def failure(self) -> str | None:
        """Why the job must stop, or None."""
        return self._failure or self.orders.failure

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
    def trained(self) -> bool:
        """Whether every batch is done, or the run has stopped early."""
        if self.schedule is None:
            return False
        return self.schedule.finished or self._review.stopped is not None

    @property
    def stopped(self) -> EarlyStop | None:
        """Why the run stops early, or None."""
        return self._review.stopped

    @property
    def best(self) -> EpochRow | None:
        """The epoch whose checkpoint the run ends with, if it restores the best one."""
        stop = self.run.description.stop_early
        if stop is None or not stop.restore_best:
            return None
        best = _best_of(self.history.rows, stop.objective)
        return best if best is not None and best.checkpoint else None

    @property
    def kept(self) -> EpochRow | None:
        """The best epoch with a checkpoint, of a job that keeps its best checkpoint."""
        objective = self.run.description.keep_best
        if objective is None:
            return None
        return _best_of([row for row in self.history.rows if row.checkpoint], objective)

    @property
    def rate_due(self) -> float | None:
        """The factor of the learning rate from the next epoch on, or None if it is in force."""
        rate = self._review.rate
        return None if self.trained or rate == self.run.followed[-1].rate else rate

    @property
    def paced(self) -> bool:
        """Whether an epoch begins only once the one before is evaluated."""
        return self.run.description.paced

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

    @property
    def rule_due(self) -> bool:
        """Whether the job has to switch to the policy that its rule names."""
        return (
            self.run.rule is not None
            and self.schedule is not None
            and self.schedule.exhausted
            and self._review.awaited is None
            and len(self.schedule.finished_epochs) >= self.run.rule.epoch
            and not self.trained
        )

    @property
    def loss(self) -> float:
        """Mean loss of the last steps; NaN before the first."""
        return self._guard.loss

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
        self.history.begin(schedule.finished_epochs, run)
        self.run, self.orders, self.schedule = run, orders, schedule
        self._guard.follow(run.settings)
        self._undecided, self._closed, self._at_outset = None, False, False
        self._review = Review(run.description.epochs)
        self.progress.skipped = outset.batches_skipped(run)
        self._look_back()
        self._evaluate_again(outset)

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
        if self.schedule is not None and not self._closed:
            self.schedule.tick(now)
            if not self.trained:
                self.orders.saving.look(self.span.step)
            awaited = self._review.awaited
            if awaited is not None and self.orders.evaluations.idle:
                self.orders.saving.evaluate(awaited)
        self.orders.saving.final.retry(now)
        self.notes.retry()
        if self._undecided is not None and self.rounds is not None:
            self._decide(self.rounds, now)

    def lease(self, worker: str, now: float, received: int, workers: int) -> Train | Round | Wait:
        """Leases training work to ``worker``, or says what it waits for."""
        assert self.schedule is not None
        work = self.schedule.lease(worker, now, received, workers)
        if isinstance(work, Wait) and self._review.awaited is not None:
            return Wait(self.waiting_for())
        if not isinstance(work, Wait):
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
        """Async: records batches that are done on all shards. Raises InvalidArgument."""
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
                self._step_done(step, report.loss, report.staleness)
        if counted:
            after = self.ledger.span.step
            finished = self.ledger.take_finished_epochs()
            self.orders.saving.stepped(before, after, finished)
            self._epochs_done(finished, after)

    def commit(self, worker: str, round_number: int, report: Report, now: float) -> None:
        """Sync: commits an attempt that all shards hold; decides the round if it was the last.

        Raises:
            InvalidArgument: the job is not synchronous, or the attempt is unknown.
        """
        rounds = self.rounds
        if rounds is None:
            raise InvalidArgument("this job is async: batches are reported with LeaseWork")
        if self._closed:
            return
        if rounds.commit(worker, round_number, report, now) is None:
            self.progress.in_vain(worker, report)
            return
        self._batch_done(worker, report, now)
        if rounds.complete:
            self._decide(rounds, now)

    def order_due(self) -> None:
        """Orders the snapshots that are due and that no decision carries."""
        waits = self._review.awaited is not None
        outset, self._at_outset = self._at_outset, False
        if self.rounds is None or self.trained or self._closed or self.drained or waits or outset:
            self.orders.order_due(self.span.step, self.trained)
        self._warnings.take(self.orders)

    def request_checkpoint(self) -> int:
        """Requests a checkpoint of now or later; returns its number, for :meth:`is_saved`."""
        return 0 if self.trained else self.orders.request(self.span.step)

    def close(self) -> None:
        """Stops deciding, so that the final state can be saved. Async: the next generation repeats
        pushes that are still in flight."""
        if self._undecided is not None:
            self.orders.withdraw(self._undecided.snapshots)
        self._closed, self._undecided = True, None

    def is_saved(self, number: int) -> bool:
        """Whether the checkpoint of this number or a later one is committed; once training is done,
        whether the final one is."""
        if self.trained:
            return self.orders.saving.final.saved
        return self.orders.is_saved(number)

    def is_lost(self, number: int) -> bool:
        """Whether the checkpoint of this number failed and no later one is committed. The final
        one is never lost, since it is ordered again."""
        return not self.trained and self.orders.is_lost(number)

    def merged(self, worker: str, evaluation: str, values: Mapping[str, float]) -> None:
        """Records an evaluation's results, merged by ``worker``. Raises InvalidArgument."""
        result = self.orders.evaluations.merged(worker, evaluation, values)
        if result is None:
            return
        epoch = epoch_of(evaluation, len(self.history.rows) - 1)
        if evaluation.startswith(TRAINING):
            unsummed = self.run.description.unsummed_metrics
            summed = {name: value for name, value in values.items() if name not in unsummed}
            self._trained(epoch, summed)
            return
        checkpoint = result.snapshot if is_checkpoint(result.snapshot) else ""
        self.history.evaluated(epoch, values, checkpoint, result.global_step)
        self._look_back()
        step = result.global_step
        self.notes.note_evaluation(evaluation, self.run.generation, step, values)
        self._curves.epoch(values, step)
        log.info("evaluated", evaluation=evaluation, step=step, **values)
        self.orders.release(result.snapshot)

    def take_totals(self, epochs: Sequence[EpochTotals]) -> None:
        """Takes the totals that shard 0 counted in epochs of this generation, and turns those of
        finished epochs without results into results."""
        records = self.run.description.train_records
        for known in epochs:
            if known.records < records or not self.history.lacks_training(known.epoch):
                continue
            if len(known.totals) > LOSS:
                name, step = training_of(known.epoch), self.span.step
                self.orders.evaluations.add_training(name, step, known.totals)
            elif known.totals[1]:
                self._trained(known.epoch, {"loss": known.totals[0] / known.totals[1]})

    def missed(self, shard: int) -> list[Command]:
        """Returns the commands that a shard may have missed without a command stream."""
        missed: list[Command] = []
        if self.rounds is not None and self.rounds.decisions:
            # Decisions may order snapshots, for which the shard needs room.
            missed = [*self.orders.releases, *self.rounds.decisions]
        return missed + self.orders.missed(shard)

    def _decide(self, rounds: Rounds, now: float) -> None:
        step = rounds.round + 1
        if self._undecided is None:
            trained = rounds.ends_job
            ended = [rounds.span.epoch] if rounds.ends_epoch else []
            self.orders.saving.stepped(rounds.round, step, ended)
            self._undecided = rounds.decide(self.orders.with_decision(step, trained))
        decision = self._undecided
        # Store before sending: a restarted coordinator must not decide otherwise.
        try:
            self._store.put_decision(decision)
        except sqlite3.Error as error:
            self._warnings.add(
                f"round {decision.round} waits: its decision cannot be stored: {error}"
            )
            return
        self._undecided = None
        reports = rounds.reports()
        rounds.close(decision)
        self._send(decision)
        if any(not report.skipped for report in reports):
            self._step_done(step, mean_loss(reports), 0)
        self.progress.stepped(1, now)
        self._epochs_done(rounds.take_finished_epochs(), step)
        self._warnings.take(self.orders)
        if rounds.complete and not self._closed:
            # Its commits came while the previous decision waited for the disk.
            self._decide(rounds, now)

    def _new_orders(self, run: Run) -> Orders:
        return Orders(run, self._store.newest_checkpoint(), self._disk, self._send, self._cadence)

    def _evaluate_again(self, outset: InitialWork) -> None:
        """Orders the evaluation of the last finished epoch, if it has no result and the shards
        still hold its state: all of its batches and none of a later epoch. The states of other
        epochs are gone, and their rows stay as they are."""
        if not self.run.description.eval_records:
            return
        lacking = [row.epoch for row in self.history.rows if not row.evaluation]
        done = len(self.history.rows)
        at_end = self.span.batches == done * self.run.description.per_epoch
        here = done - 1 if at_end and not outset.partial else None
        for epoch in lacking:
            if epoch != here:
                self._warnings.add(NotEvaluated(epoch, ": its state is gone"))
        if here in lacking:
            step = self.span.step
            self.orders.saving.stepped(step, step, [here])
            self._at_outset = True

    def _batch_done(self, worker: str, report: Report, now: float) -> None:
        self.progress.done(worker, report, now)
        if report.skipped:
            look = f"; look at the data: {report.not_finite}" if report.not_finite else ""
            self._warnings.add(
                f"{report.batch} were skipped: their gradient is NaN or infinite ({worker}){look}"
            )
        verdict = self._guard.batch(report.batch, report.skipped, report.staleness)
        self._failure = self._failure or verdict

    def _step_done(self, step: int, loss: float, staleness: int) -> None:
        self._curves.step(step, loss, staleness)
        self._failure = self._failure or self._guard.step(loss)
        self._warnings.take(self._guard)
        self.notes.note_first_loss(self._guard.first_loss)

    def waiting_for(self) -> str:
        """Says what the next step waits for; empty when there is work."""
        awaited = self._review.awaited
        if awaited is not None:
            what = self.orders.evaluations.waiting_for()
            return f"epoch {awaited + 1} to be evaluated" + (f": {what}" if what else "")
        return self.schedule.waiting_for() if self.schedule is not None else ""

    def _look_back(self) -> None:
        """Opens the next epoch if the results so far allow it."""
        if not self.paced or self.schedule is None:
            return
        description = self.run.description
        done = set(self.schedule.finished_epochs)
        evaluations = [row.evaluation for row in self.history.rows if row.epoch in done]
        self._review = review(
            evaluations,
            description.stop_early,
            description.reduce_lr,
            at_end=self.span.batches == len(evaluations) * description.per_epoch,
            epochs=description.epochs,
            first_rate=first_learning_rate(self.run) or 1.0,
        )
        if self._review.stopped is not None:
            self.orders.saving.final.known = True
            log.info("stopped early", why=self._review.stopped.reason)
        elif self.rate_due is None:
            rule = self.run.rule
            until = self._review.until
            self.schedule.extend(until if rule is None else min(until, rule.epoch))

    def _epochs_done(self, epochs: Sequence[int], step: int) -> None:
        self.history.finished(epochs, self.run)
        self._look_back()
        for epoch in epochs:
            # The loss as known here: the shards' counts may take a second to arrive.
            loss = self.progress.epoch_loss(epoch)
            log.info("epoch done", epoch=epoch + 1, step=step, train_loss=loss)

    def _trained(self, epoch: int, values: Mapping[str, float]) -> None:
        row = self.history.trained(epoch, values)
        if row is not None:
            named = {f"train_{name}": value for name, value in values.items()}
            self._curves.epoch(named, row.step)
            log.info("epoch trained", epoch=epoch + 1, step=row.step, **named)


def _best_of(rows: Sequence[EpochRow], objective: Objective) -> EpochRow | None:
    best = best_epoch(evaluations_of([row.evaluation for row in rows], objective), objective)
    return None if best is None else rows[best - 1]
