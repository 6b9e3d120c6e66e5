"""Drives a job as ``keras.Model.fit`` drives a training loop: callbacks run in the caller."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import keras

from psrpc.core.errors import InvalidArgument
from psrpc.core.names import HISTORY
from worker.embedding.model_tables import serve_callbacks, trained_tables
from worker.fit.attendant import Attendant, HeldJob
from worker.fit.hooks import BestTables, looking
from worker.fit.mirror import Mirror
from worker.fit.prepare import FitCall
from worker.fit.progress import EpochProgress
from worker.fit.training_logs import kept_epochs, merged_metrics, totals, unsummed_metrics
from worker.model.loss_scale import inner


class Fitting:
    """One ``fit`` on a cluster, from its first hold to its last. Use it once.

    The model of the caller is a mirror of the job's state. It is updated at each hold, and changes
    that callbacks make in it go back to the job when the hold ends.
    """

    def __init__(self, call: FitCall, attendant: Attendant) -> None:
        self._model = call.model
        self._run_dir = call.run_dir
        self._attendant = attendant
        self._schedule = call.schedule
        self._callbacks = call.hooks
        self._base_rate = call.base_rate
        self._validation = call.validation
        self._mirror = Mirror(call.model)
        self._best = BestTables(call.model, call.hooks.callbacks, call.run_dir / "best")
        self._hold: HeldJob | None = None
        self._unsummed: Collection[str] = ()

    def run(self) -> None:
        """Trains all epochs, or until a callback sets ``stop_training``.

        Raises:
            JobFailed: the job failed.
        """
        model = self._model
        model.stop_training = False
        self._hold = self._attendant.await_hold(-1)
        self._unsummed = unsummed_metrics(self._run_dir)
        if not int(model.optimizer.iterations) and not trained_tables(model):
            # The job began with this state of the model. After a load, the model goes back to the
            # job only if a callback changes it.
            self._mirror.load(self._hold.checkpoint)
        serve_callbacks(model)
        self._callbacks.on_train_begin()
        # BackupAndRestore has set it, if it has restored anything.
        self._schedule = self._schedule.begun_at(model._initial_epoch)
        logs = self._with_holds() if self._is_looked_at else self._without_holds()
        if self._schedule.epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        self._callbacks.on_train_end(logs=logs)
        if not self._best.restore():
            self._mirror.check_not_set_back()

    def finish(self) -> bool:
        """Lets the job end by itself if all its batches are done; returns whether they are."""
        hold, total = self._hold, self._schedule.total
        if hold is None or hold.over:
            return hold is not None
        if hold.at == total:
            self._attendant.end_hold(hold.at, total + 1)
            self._attendant.await_hold(hold.at)
        return hold.at == total

    def load_newest(self) -> None:
        """Loads the newest checkpoint of a run that was stopped, if it has one."""
        checkpoint = self._attendant.newest_checkpoint()
        if checkpoint is None:
            return
        self._mirror.load(checkpoint)
        if self._hold is not None and not self._is_looked_at:
            self._record(checkpoint)

    @property
    def _is_looked_at(self) -> bool:
        """Whether a callback or a validation looks at the model while it trains."""
        return self._validation is not None or bool(looking(self._callbacks.callbacks))

    def _with_holds(self) -> dict[str, float] | None:
        """Trains with a hold before each hook that may look at the model; returns the results of
        the last epoch."""
        logs: dict[str, float] | None = None
        for epoch in range(self._schedule.first, self._schedule.epochs):
            self._model.reset_metrics()
            self._callbacks.on_epoch_begin(epoch)
            logs = self._epoch(epoch)
            self._callbacks.on_epoch_end(epoch, logs)
            if self._hold is not None:
                self._best.keep(self._hold.checkpoint)
            if self._model.stop_training:
                break
        return logs

    def _epoch(self, epoch: int) -> dict[str, float]:
        """Trains one epoch; returns its results, those of the validation data included."""
        schedule, step = self._schedule, 0
        logs: dict[str, float] = {}
        while step < schedule.steps:
            self._callbacks.on_train_batch_begin(step)
            step = min(step + schedule.every, schedule.steps)
            hold = self._go(schedule.limit(epoch, step))
            counted = totals(hold.checkpoint)[epoch - schedule.first]
            logs = merged_metrics(self._model, counted, self._unsummed)
            self._callbacks.on_train_batch_end(step - 1, logs)
            if self._model.stop_training:
                break
        if schedule.validates(epoch):
            logs = {**logs, **self._validated(hold)}
        return logs

    def _validated(self, hold: HeldJob) -> dict[str, float]:
        """Returns the results of the validation data. For callbacks, all of it is one batch."""
        validation, callbacks = self._validation, self._callbacks
        assert validation is not None
        callbacks.on_test_begin()
        callbacks.on_test_batch_begin(0)
        results = dict(hold.evaluation)
        # With averages of weights, a job evaluates the averages, but ``fit`` the weights.
        averages = inner(self._model.optimizer).use_ema
        if averages or not results or self._mirror.changed():
            results = validation.evaluate()
        callbacks.on_test_batch_end(validation.steps - 1, results)
        callbacks.on_test_end(results)
        return {f"val_{name}": value for name, value in results.items()}

    def _without_holds(self) -> dict[str, float] | None:
        """Trains without holds but one at the end, and one whenever shards have as many epochs as
        they keep the totals of. Returns the results of the last epoch."""
        schedule, logs = self._schedule, None
        bars = self._of(keras.callbacks.ProgbarLogger)
        progress = EpochProgress(next(iter(bars), None), schedule, self._run_dir / HISTORY)
        at_once = kept_epochs(self._model)
        for first in range(schedule.first, schedule.epochs, at_once):
            last = min(first + at_once, schedule.epochs) - 1
            hold = self._go(schedule.limit(last, schedule.steps), progress)
            logs = self._record(hold.checkpoint, progress)
        return logs

    def _record(
        self, checkpoint: Path, progress: EpochProgress | None = None
    ) -> dict[str, float] | None:
        """Gives the results of epochs that are done, as of ``checkpoint``, to ``History``; returns
        those of the last one."""
        schedule, logs, rows = self._schedule, None, totals(checkpoint)
        for epoch in range(schedule.first + len(self._model.history.epoch), schedule.epochs):
            row = rows.get(epoch - schedule.first)
            if row is None or row[1] < schedule.records:
                break
            logs = merged_metrics(self._model, row, self._unsummed)
            for history in self._of(keras.callbacks.History):
                history.on_epoch_end(epoch, dict(logs))
            if progress is not None:
                progress.ended(epoch, logs)
        return logs

    def _of(self, kind: type) -> list[Any]:
        """Returns the callbacks of a class of Keras's."""
        return [each for each in self._callbacks.callbacks if type(each) is kind]

    def _go(self, until: int, progress: EpochProgress | None = None) -> HeldJob:
        """Sends the changes of callbacks to the job, ends its hold, and waits for the next one, at
        ``until`` batches."""
        assert self._hold is not None
        begun = hold = self._hold
        changed = self._mirror.changed()
        if changed:
            self._mirror.check_not_set_back()
        while not hold.over and hold.at < until:
            restore = ""
            if changed and hold.checkpoint == begun.checkpoint:
                copy = hold.checkpoint.with_name(f"{hold.checkpoint.name}.set")
                restore = copy.name
                if not copy.exists():
                    self._mirror.save(hold.checkpoint, copy)
            try:
                self._attendant.end_hold(hold.at, until, self._rate(), restore)
            except InvalidArgument:
                # A restarted coordinator may hold at other batches.
                other = self._attendant.await_hold(-1)
                if (other.at, other.checkpoint) == (hold.at, hold.checkpoint):
                    raise
                hold = other
                continue
            look = progress.at if progress is not None and progress.shown else None
            hold = self._attendant.await_hold(hold.at, look)
        self._mirror.load(hold.checkpoint)
        self._hold = hold
        return hold

    def _rate(self) -> float | None:
        """Returns the present learning rate as a factor of the job's; None under a schedule."""
        if math.isnan(self._base_rate):
            return None
        return float(self._model.optimizer.learning_rate) / self._base_rate
