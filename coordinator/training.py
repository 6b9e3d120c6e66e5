"""The work of one run: batches, rounds, snapshots and evaluations, put together.

Deterministic: time comes in, commands go out through ``send``. The store is its only effect
besides; a round's decision is stored before it is sent.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence

from coordinator.curves import Curves
from coordinator.evaluation import Evaluations
from coordinator.guard import Guard
from coordinator.ledger import Ledger
from coordinator.progress import Progress, mean_loss
from coordinator.rounds import Rounds
from coordinator.run import Run
from coordinator.saving import Saving
from coordinator.snapshots import Failed, Snapshots, Taken
from coordinator.store import Store
from coordinator.work import (
    Command,
    Decision,
    Release,
    Report,
    Round,
    SnapshotOrder,
    Span,
    Train,
    Wait,
)
from psrpc.errors import CheckpointError, InvalidArgument
from psrpc.intervals import IntervalSet
from psrpc.logs import get_logger

log = get_logger()

FIRST_LOSS = "first_loss"
"""The store's key of the guard's reference, which a resumed job keeps."""

Positions = Mapping[int, IntervalSet]


class Training:
    """What is to be done and what is done. ``failure`` says why the job must stop."""

    def __init__(
        self,
        run: Run,
        store: Store,
        curves: Curves,
        send: Callable[[Command], None],
        prepare: Callable[[SnapshotOrder], None],
    ) -> None:
        """``send`` reaches every shard; ``prepare`` makes the directory of an order, or raises
        CheckpointError."""
        description = run.description
        self._run = run
        self._store = store
        self._curves = curves
        self._send = send
        self._prepare = prepare
        self.evaluations = Evaluations(description.eval_records, description.batch_size)
        self.snapshots = Snapshots(run.plan.shards)
        self.saving = Saving(
            snapshots=self.snapshots,
            evaluations=self.evaluations,
            every=description.checkpoint_every,
            last_epoch=description.epochs - 1,
            evaluates=description.eval_records > 0,
            restored_step=run.restored.global_step if run.restored else None,
        )
        self.progress = Progress()
        self.failure: str | None = None
        self.warnings: list[str] = []
        self.results: list[tuple[str, int, dict[str, float]]] = []
        self.ledger: Ledger | None = None
        self.rounds: Rounds | None = None
        first_loss = None
        if run.restored is not None:
            first_loss = store.get(FIRST_LOSS)
            self.results = store.evaluations(run.restored.global_step)
        self._guard = Guard(description.mode, first_loss)
        self._guarded = first_loss

    @property
    def schedule(self) -> Ledger | Rounds | None:
        """Who trains what next; None until :meth:`begin`."""
        return self.ledger or self.rounds

    @property
    def span(self) -> Span:
        """Where training stands."""
        if self.schedule is not None:
            return self.schedule.span
        step = self._run.restored.global_step if self._run.restored else 0
        return Span(step, self._run.description.total_updates, 0, 0, 0)

    @property
    def trained(self) -> bool:
        """Whether every batch is done."""
        return self.schedule is not None and self.schedule.finished

    @property
    def loss(self) -> float:
        """Mean loss of the last steps; NaN before the first."""
        return self._guard.loss

    def begin(self, applied: Sequence[Positions], skipped: Sequence[Positions]) -> None:
        """All shards stand where training starts; ``applied`` and ``skipped`` are their
        applied-sets and the skipped part of them, per shard and epoch. What all have is done."""
        description, run = self._run.description, self._run
        done = _common(applied)
        gone = _common(skipped)
        self.progress = Progress(self._count_batches(gone))
        if description.mode == "sync":
            self.rounds = Rounds(
                records=description.train_records,
                batch_size=description.batch_size,
                epochs=description.epochs,
                replicas=description.replicas,
                generation=run.generation,
                first_round=run.restored.global_step if run.restored else 0,
                first_attempt=run.first_attempt,
                skipped_records=sum(len(positions) for positions in gone.values()),
            )
        else:
            self.ledger = Ledger(
                records=description.train_records,
                batch_size=description.batch_size,
                epochs=description.epochs,
                first_attempt=run.first_attempt,
                done=done,
                skipped=gone,
            )

    def lease(self, worker: str, now: float, received: int, workers: int) -> Train | Round | Wait:
        """A batch or more to train."""
        assert self.schedule is not None
        work = self.schedule.lease(worker, now, received, workers)
        if not isinstance(work, Wait):
            self.progress.leased(now)
        return work

    def release(self, worker: str, lost: bool) -> int:
        """Takes back what ``worker`` holds; how many batches and tasks that was. Its batches have
        failed if it is ``lost``, and not if it has given them back."""
        batches = self.schedule.release(worker) if self.schedule else []
        self.progress.failed += len(batches) if lost else 0
        return len(batches) + self.evaluations.release(worker)

    def record(self, worker: str, reports: Sequence[Report], now: float) -> None:
        """Async: batches that are done on all shards. Raises InvalidArgument."""
        if self.ledger is None:
            return
        before = self.ledger.span.step
        counted = self.ledger.report(worker, reports, now)
        for step, report in enumerate(counted, before + 1):
            self._batch_done(worker, report, now)
            if not report.skipped:
                self._step_done(step, report.loss, report.staleness)
        if counted:
            after = self.ledger.span.step
            finished = self.ledger.take_finished_epochs()
            self.saving.stepped(before, after, finished)
            self._epochs_done(finished, after)

    def commit(self, worker: str, round_number: int, report: Report, now: float) -> None:
        """Sync: all shards hold an attempt; decides the round if it was the last one.

        Raises:
            InvalidArgument: the job is not synchronous, or the attempt is unknown.
        """
        rounds = self.rounds
        if rounds is None:
            raise InvalidArgument("this job is async: batches are reported with LeaseWork")
        if rounds.commit(worker, round_number, report).counted is None:
            return
        self._batch_done(worker, report, now)
        if rounds.complete:
            self._decide(rounds)

    def order_first(self) -> None:
        """Orders the step-0 checkpoint, once."""
        order = self.saving.order_first()
        if order is not None:
            self._order(order)

    def order_due(self) -> None:
        """Orders the snapshots that are due and that no decision carries."""
        if self.rounds is not None and not self.trained:
            return
        while (order := self.saving.next_order(self.span.step, self.trained)) is not None:
            self._order(order)
        self._take_warnings()

    def snapshot_taken(self, taken: Taken) -> None:
        """Every shard has it, and a checkpoint is committed."""
        self.snapshots.written(taken.order.name)
        self.saving.taken(taken.order.name)
        self.evaluations.snapshot_taken(taken.order.name)
        if taken.order.write:
            self._store.put_checkpoint(
                taken.order.name, self._run.generation, taken.order.global_step
            )

    def snapshot_failed(self, failed: Failed) -> None:
        """A shard could not take it, or it cannot be committed."""
        self.snapshots.written(failed.order.name)
        if self.snapshots.release(failed.order.name):
            self._send(Release(failed.order.name))
        self.failure = self.failure or self.saving.failed(failed)
        self._take_warnings()

    def merged(self, evaluation: str, values: Mapping[str, float]) -> None:
        """An evaluation's results. Raises InvalidArgument."""
        result = self.evaluations.merged(evaluation, values)
        if result is None:
            return
        row = (evaluation, result.global_step, dict(values))
        self._stored(
            f"evaluation {evaluation}",
            lambda: self._store.put_evaluation(row[0], self._run.generation, row[1], row[2]),
        )
        self.results = [*(r for r in self.results if r[0] != evaluation), row]
        self._curves.epoch(values, result.global_step)
        log.info("evaluated", evaluation=evaluation, step=result.global_step, **row[2])
        if self.snapshots.release(result.snapshot):
            self._send(Release(result.snapshot))

    def missed(self, shard: int) -> list[Command]:
        """What a shard may have missed while it had no command stream open."""
        missed: list[Command] = []
        if self.rounds is not None and self.rounds.last_decision is not None:
            missed.append(self.rounds.last_decision)
        missed += self.snapshots.lacking(shard)
        missed += [Release(name) for name in self.snapshots.released]
        return missed

    def _decide(self, rounds: Rounds) -> None:
        step = rounds.round + 1
        trained = step == rounds.total_rounds
        ended = [rounds.span.epoch] if rounds.ends_epoch else []
        self.saving.stepped(rounds.round, step, ended)
        order = self.saving.next_order(step, trained, by_decision=True)
        if order is not None and not self._make_directory(order):
            order = None
        decision: Decision = rounds.decide((order,) if order else ())
        reports = rounds.reports()
        # First to the disk, then to the world: a restarted coordinator must not decide otherwise.
        what = f"the decision of round {decision.round}"
        if not self._stored(what, lambda: self._store.put_decision(decision)):
            return
        rounds.close(decision)
        self._send(decision)
        if any(not report.skipped for report in reports):
            self._step_done(step, mean_loss(reports), 0)
        self._epochs_done(rounds.take_finished_epochs(), step)
        self._take_warnings()

    def _stored(self, what: str, store: Callable[[], None]) -> bool:
        """Whether the store has taken it; a ledger that cannot be written ends the job."""
        try:
            store()
        except sqlite3.Error as error:
            self.failure = self.failure or f"{what} cannot be stored: {error}"
            return False
        return True

    def _order(self, order: SnapshotOrder) -> None:
        if self._make_directory(order):
            log.info("snapshot ordered", snapshot=order.name, write=order.write, keep=order.keep)
            self._send(order)

    def _make_directory(self, order: SnapshotOrder) -> bool:
        """Where a checkpoint goes; False when there is no place, which is noted."""
        if not order.write:
            return True
        try:
            self._prepare(order)
        except CheckpointError as error:
            self.snapshots.withdraw(order.name)
            self.snapshot_failed(Failed(order, str(error)))
            return False
        return True

    def _batch_done(self, worker: str, report: Report, now: float) -> None:
        self.progress.done(worker, report, now)
        if report.skipped:
            log.warning("batch skipped", batch=str(report.batch), worker=worker)
            self._warn(f"{report.batch} was skipped: its gradient is NaN or infinite")
        self.failure = self.failure or self._guard.batch(report.batch, report.skipped)

    def _step_done(self, step: int, loss: float, staleness: int) -> None:
        self._curves.step(step, loss, staleness)
        self.failure = self.failure or self._guard.step(loss)
        if self._guard.first_loss != self._guarded:
            self._guarded = self._guard.first_loss
            self._stored("the first loss", lambda: self._store.put(FIRST_LOSS, self._guarded))

    def _epochs_done(self, epochs: Sequence[int], step: int) -> None:
        for epoch in epochs:
            loss = self.progress.epoch_loss(epoch)
            self._curves.epoch({"train_loss": loss}, step)
            log.info("epoch done", epoch=epoch, step=step, train_loss=loss)

    def _take_warnings(self) -> None:
        warnings, self.saving.warnings = self.saving.warnings, []
        for warning in warnings:
            log.warning(warning)
            self._warn(warning)

    def _warn(self, warning: str) -> None:
        self.warnings = [*self.warnings, warning][-50:]

    def _count_batches(self, positions: Positions) -> int:
        size = self._run.description.batch_size
        return sum(
            -(-stop // size) - start // size for p in positions.values() for start, stop in p
        )


def _common(sets: Sequence[Positions]) -> dict[int, IntervalSet]:
    """The positions that are in all of several sets, per epoch."""
    common: dict[int, IntervalSet] = {}
    for epoch in set.intersection(*(set(one) for one in sets)) if sets else set():
        first, *others = (one[epoch] for one in sets)
        for other in others:
            first = first.intersection(other)
        common[epoch] = first
    return common
