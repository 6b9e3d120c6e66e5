"""The epochs of a run: totals, ends, evaluations, and the decisions that depend on the results.

Deterministic; the only side effects are on the store, the curves and the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.checkpoints.orders import Orders
from coordinator.checkpoints.snapshots import is_checkpoint
from coordinator.core.plateau import EarlyStop, Review, best_epoch, evaluations_of, review
from coordinator.core.retention import Objective
from coordinator.core.run import Run
from coordinator.core.work import TrainingPosition
from coordinator.membership.progress import Progress
from coordinator.records.curves import Curves
from coordinator.records.epochs import EpochHistory, EpochRow, first_learning_rate
from coordinator.records.notes import JobWarnings, Notes, NotEvaluated
from coordinator.schedule.evaluation import TRAINING, epoch_of, training_of
from coordinator.schedule.ledger import Ledger
from coordinator.schedule.rounds import Rounds
from psrpc.core.batch import LOSS
from psrpc.core.shard_reports import EpochTotals
from psrpc.ops.logs import get_logger

log = get_logger()


class Epochs:
    """The epochs of a run, trained and to train. :meth:`begin` starts each generation; the
    ``history`` stays. Not thread-safe."""

    def __init__(
        self,
        run: Run,
        orders: Orders,
        history: EpochHistory,
        notes: Notes,
        progress: Progress,
        curves: Curves,
        warnings: JobWarnings,
        attended: bool = False,
    ) -> None:
        """In an ``attended`` job the attendant sets the learning rate."""
        self.history = history
        self._attended = attended
        self._run = run
        self._orders = orders
        self._schedule: Ledger | Rounds | None = None
        self._review = Review(run.description.epochs)
        self._notes = notes
        self._progress = progress
        self._curves = curves
        self._warnings = warnings

    @property
    def over(self) -> bool:
        """True once every batch is done, or the run has stopped early."""
        if self._schedule is None:
            return False
        return self._schedule.finished or self._review.stopped is not None

    @property
    def stopped(self) -> EarlyStop | None:
        """Why the run stops early, or None."""
        return self._review.stopped

    @property
    def awaited(self) -> int | None:
        """The epoch whose evaluation the next epoch or a hold waits for, or None."""
        return self._ended_at_hold if self._review.awaited is None else self._review.awaited

    @property
    def ended_here(self) -> EpochRow | None:
        """The epoch that has just ended, before any batch of the next one is done, or None."""
        rows, schedule = self.history.rows, self._schedule
        ended = schedule and schedule.span.batches == len(rows) * self._run.description.per_epoch
        return rows[-1] if rows and ended else None

    @property
    def _ended_at_hold(self) -> int | None:
        held = self._schedule is not None and self._schedule.held and not self.over
        row = self.ended_here if held and self._run.description.eval_records else None
        return None if row is None or row.evaluation else row.epoch

    @property
    def best(self) -> EpochRow | None:
        """The epoch whose checkpoint the run ends with, if it restores the best one."""
        stop = self._run.description.stop_early
        if stop is None or not stop.restore_best:
            return None
        best = _best_of(self.history.rows, stop.objective)
        return best if best is not None and best.checkpoint else None

    @property
    def kept(self) -> EpochRow | None:
        """The best epoch with a checkpoint, of a job that keeps its best checkpoint."""
        objective = self._run.description.keep_best
        if objective is None:
            return None
        return _best_of([row for row in self.history.rows if row.checkpoint], objective)

    @property
    def rate_due(self) -> float | None:
        """The factor of the learning rate from the next epoch on, or None if that is in force
        already."""
        rate = self._review.rate
        return None if self.over or self._attended or rate == self._run.followed[-1].rate else rate

    @property
    def rule_due(self) -> bool:
        """True if the job has to switch to the policy that its rule names."""
        return (
            self._run.rule is not None
            and self._schedule is not None
            and self._schedule.exhausted
            and self.awaited is None
            and len(self._schedule.finished_epochs) >= self._run.rule.epoch
            and not self.over
        )

    def begin(self, run: Run, orders: Orders, schedule: Ledger | Rounds, partial: bool) -> bool:
        """Starts a generation whose shards have the batches that ``schedule`` says; ``partial``
        says whether some have batches that others lack. Returns whether that state awaits
        evaluation.

        Raises:
            sqlite3.Error: the store cannot be read; nothing has changed.
        """
        self.history.begin(schedule.finished_epochs, run)
        self._run, self._orders, self._schedule = run, orders, schedule
        self._review = Review(run.description.epochs)
        self._look_back()
        return self._evaluate_again(schedule.span, partial)

    def finished(self, epochs: Sequence[int], step: int) -> None:
        """Records that the last batches of ``epochs`` are done, by ``step``."""
        self.history.finished(epochs, self._run)
        self._look_back()
        for epoch in epochs:
            # The loss as known here: the shards' counts may take a second to arrive.
            loss = self._progress.epoch_loss(epoch)
            log.info("epoch done", epoch=epoch + 1, step=step, train_loss=loss)

    def retry(self) -> None:
        """Requests the evaluation that the next epoch waits for again, if it was lost. Call it
        periodically during training."""
        awaited = self.awaited
        if awaited is not None and self._orders.evaluations.idle:
            self._orders.saving.evaluate(awaited)

    def waiting_for(self) -> str:
        """Says which evaluation the next epoch waits for; empty for none."""
        awaited = self.awaited
        if awaited is None:
            return ""
        what = self._orders.evaluations.waiting_for()
        return f"epoch {awaited + 1} to be evaluated" + (f": {what}" if what else "")

    def merged(self, worker: str, evaluation: str, values: Mapping[str, float]) -> None:
        """Records an evaluation's results, merged by ``worker``. Raises InvalidArgument."""
        result = self._orders.evaluations.merged(worker, evaluation, values)
        if result is None:
            return
        epoch = epoch_of(evaluation, len(self.history.rows) - 1)
        if evaluation.startswith(TRAINING):
            unsummed = self._run.description.unsummed_metrics
            summed = {name: value for name, value in values.items() if name not in unsummed}
            self._trained(epoch, summed)
            return
        checkpoint = result.snapshot if is_checkpoint(result.snapshot) else ""
        self.history.evaluated(epoch, values, checkpoint, result.global_step)
        self._look_back()
        step = result.global_step
        self._notes.note_evaluation(evaluation, self._run.generation, step, values)
        self._curves.epoch(values, step)
        log.info("evaluated", evaluation=evaluation, step=step, **values)
        self._orders.release(result.snapshot)

    def take_totals(self, epochs: Sequence[EpochTotals]) -> None:
        """Takes the totals that shard 0 counted in epochs of this generation, and turns those of
        finished epochs without results into results."""
        records = self._run.description.train_records
        for known in epochs:
            if known.records < records or not self.history.lacks_training(known.epoch):
                continue
            if len(known.totals) > LOSS:
                assert self._schedule is not None
                name, step = training_of(known.epoch), self._schedule.span.step
                self._orders.evaluations.add_training(name, step, known.totals)
            elif known.totals[1]:
                self._trained(known.epoch, {"loss": known.totals[0] / known.totals[1]})

    def _evaluate_again(self, span: TrainingPosition, partial: bool) -> bool:
        """Orders the evaluation of the last finished epoch, if it has no result and the shards
        still hold its state: all of its batches and none of a later epoch. The states of other
        epochs are gone, and their rows stay as they are. Returns whether it ordered one."""
        if not self._run.description.eval_records:
            return False
        lacking = [row.epoch for row in self.history.rows if not row.evaluation]
        done = len(self.history.rows)
        at_end = span.batches == done * self._run.description.per_epoch
        here = done - 1 if at_end and not partial else None
        for epoch in lacking:
            if epoch != here:
                self._warnings.add(NotEvaluated(epoch, ": its state is gone"))
        if here in lacking:
            self._orders.saving.stepped(span.step, span.step, [here])
            return True
        return False

    def _look_back(self) -> None:
        """Opens the next epoch if the results so far allow it."""
        if not self._run.description.paced or self._schedule is None:
            return
        description = self._run.description
        done = set(self._schedule.finished_epochs)
        evaluations = [row.evaluation for row in self.history.rows if row.epoch in done]
        self._review = review(
            evaluations,
            description.stop_early,
            description.reduce_lr,
            at_end=self._schedule.span.batches == len(evaluations) * description.per_epoch,
            epochs=description.epochs,
            first_rate=first_learning_rate(self._run) or 1.0,
        )
        if self._review.stopped is not None:
            self._orders.saving.final.known = True
            log.info("stopped early", why=self._review.stopped.reason)
        elif self.rate_due is None:
            rule = self._run.rule
            until = self._review.until
            self._schedule.extend(until if rule is None else min(until, rule.epoch))

    def _trained(self, epoch: int, values: Mapping[str, float]) -> None:
        row = self.history.trained(epoch, values)
        if row is not None:
            named = {f"train_{name}": value for name, value in values.items()}
            self._curves.epoch(named, row.step)
            log.info("epoch trained", epoch=epoch + 1, step=row.step, **named)


def _best_of(rows: Sequence[EpochRow], objective: Objective) -> EpochRow | None:
    best = best_epoch(evaluations_of([row.evaluation for row in rows], objective), objective)
    return None if best is None else rows[best - 1]
