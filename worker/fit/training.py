"""Drives a job as ``keras.Model.fit`` drives a training loop: callbacks run in the caller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from worker.fit.attendant import Attendant, HeldJob
from worker.fit.mirror import Mirror
from worker.fit.training_logs import merged_metrics, totals

BATCH_HOOKS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)

PARTS = 10
"""Batch hooks of an epoch, by default."""


@dataclass(frozen=True)
class Course:
    """The course of a ``fit``.

    Attributes:
        first: the first epoch, ``initial_epoch``.
        epochs: the epoch to stop before, as in ``fit``.
        steps: updates of an epoch.
        per_step: batches of an update: K in sync mode, else 1.
        per_epoch: batches of an epoch.
        every: updates from one batch hook to the next.
        validated: whether there is validation data.
        validation_freq: as in ``fit``.
    """

    first: int
    epochs: int
    steps: int
    per_step: int
    per_epoch: int
    every: int
    validated: bool
    validation_freq: int | Sequence[int] = 1

    @property
    def total(self) -> int:
        """Batches of all epochs."""
        return (self.epochs - self.first) * self.per_epoch

    def limit(self, epoch: int, step: int) -> int:
        """Returns the batches that are done after ``step`` updates of ``epoch``."""
        within = min(step * self.per_step, self.per_epoch)
        return (epoch - self.first) * self.per_epoch + within

    def begun_at(self, epoch: int | None) -> Course:
        """Returns the course from ``epoch`` on; None for that of the call."""
        return self if not epoch else replace(self, first=min(epoch, self.epochs))

    def validates(self, epoch: int) -> bool:
        """Whether the results of ``epoch`` contain those of the validation data."""
        if not self.validated:
            return False
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


def has_batch_hooks(callbacks: Sequence[Any]) -> bool:
    """Whether a callback of the user's has hooks for batches."""
    own = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
    return any(
        _overrides(callback, hook)
        for callback in callbacks
        if not isinstance(callback, own)
        for hook in BATCH_HOOKS
    )


def _overrides(callback: Any, hook: str) -> bool:
    found = getattr(callback, hook)
    return getattr(found, "__func__", found) is not getattr(keras.callbacks.Callback, hook)


class Fitting:
    """One ``fit`` on a cluster, from its first hold to its last. Use it once.

    The model of the caller is a mirror of the job's state: it is read at each hold, and what
    callbacks have changed in it goes back when the hold ends.
    """

    def __init__(
        self, model: Any, attendant: Attendant, course: Course, callbacks: Any, base_rate: float
    ) -> None:
        """``callbacks`` is a ``keras.callbacks.CallbackList``; ``base_rate`` the learning rate that
        the job was described with, NaN under a schedule."""
        self._model = model
        self._attendant = attendant
        self._course = course
        self._callbacks = callbacks
        self._base_rate = base_rate
        self._mirror = Mirror(model)
        self._hold: HeldJob | None = None

    @property
    def hold(self) -> HeldJob | None:
        """The hold that the job is in."""
        return self._hold

    def run(self) -> None:
        """Trains all epochs, or until a callback sets ``stop_training``.

        Raises:
            JobFailed: the job failed.
        """
        model = self._model
        model.stop_training = False
        self._hold = self._attendant.await_hold(-1)
        if not int(model.optimizer.iterations):
            # The job has begun with the same: nothing goes back unless a callback changes it.
            self._mirror.load(self._hold.checkpoint)
        self._callbacks.on_train_begin()
        # BackupAndRestore has set it, if it has restored anything.
        self._course = course = self._course.begun_at(model._initial_epoch)
        logs: dict[str, float] | None = None
        for epoch in range(course.first, course.epochs):
            model.reset_metrics()
            self._callbacks.on_epoch_begin(epoch)
            logs = self._epoch(epoch)
            self._callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        if course.epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        self._callbacks.on_train_end(logs=logs)

    def finish(self) -> None:
        """Lets a job whose batches are all done end by itself."""
        hold, total = self._hold, self._course.total
        if hold is not None and not hold.over and hold.at == total:
            self._attendant.end_hold(hold.at, total + 1)
            self._attendant.await_hold(hold.at)

    def load_newest(self) -> None:
        """Loads the newest checkpoint of a run that was stopped."""
        self._mirror.load(self._attendant.newest_checkpoint())

    def _epoch(self, epoch: int) -> dict[str, float]:
        """Trains one epoch; returns its results, those of the validation data included."""
        course, step, hold = self._course, 0, self._hold
        logs: dict[str, float] = {}
        while step < course.steps and not self._model.stop_training:
            self._callbacks.on_train_batch_begin(step)
            step = min(step + course.every, course.steps)
            hold = self._go(course.limit(epoch, step))
            counted = totals(hold.checkpoint, epoch - course.first)
            logs = merged_metrics(self._model, counted) if counted else {}
            self._callbacks.on_train_batch_end(step - 1, logs)
        assert hold is not None
        if course.validates(epoch):
            logs = {**logs, **_of_validation(hold.evaluation)}
        return logs

    def _go(self, until: int) -> HeldJob:
        """Ends the hold with what callbacks have changed, and waits for the next one."""
        assert self._hold is not None
        at, restore = self._hold.at, ""
        if self._mirror.changed():
            restore = f"{self._hold.checkpoint.name}.set"
            self._mirror.save(self._hold.checkpoint, self._hold.checkpoint.with_name(restore))
        self._attendant.end_hold(at, until, self._rate(), restore)
        hold = self._attendant.await_hold(at)
        self._mirror.load(hold.checkpoint)
        self._hold = hold
        return hold

    def _rate(self) -> float | None:
        """Returns the present learning rate as a factor of the job's; None under a schedule."""
        if math.isnan(self._base_rate):
            return None
        return float(self._model.optimizer.learning_rate) / self._base_rate


def _of_validation(results: Mapping[str, float]) -> dict[str, float]:
    return {f"val_{name}": value for name, value in results.items()}
