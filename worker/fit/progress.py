"""Shows the progress of a job in Keras's bar, where no callback makes the job hold."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.fit.schedule import FitSchedule

_OTHERS = ("epoch", "step", "eval_step", "learning_rate")
"""Columns of a history that are no results."""


class EpochProgress:
    """The epochs of a job in Keras's progress bar. Not thread-safe."""

    def __init__(self, bar: Any, schedule: FitSchedule, history: Path) -> None:
        """``bar`` is a ``keras.callbacks.ProgbarLogger``, or None; ``history`` the ``history.csv``
        of the run, from which the bar takes the results of an epoch while later ones train."""
        self._bar = bar
        self._schedule = schedule
        self._history = history
        self._epoch = schedule.first
        self._begun = False
        self._step = 0

    @property
    def shown(self) -> bool:
        """Whether a progress bar is printed."""
        return self._bar is not None

    def at(self, batches: int) -> None:
        """Shows that so many batches of the job are done. An epoch ends in the bar once its results
        are known, which may be a second later."""
        epoch, within = divmod(batches, self._schedule.per_epoch)
        epoch += self._schedule.first
        results = self._results() if epoch > self._epoch else {}
        while self._epoch < epoch and self._epoch in results:
            self.ended(self._epoch, results[self._epoch])
        if self._epoch < self._schedule.epochs:
            waits = self._epoch < epoch
            self._move(self._schedule.steps if waits else within // self._schedule.per_step)

    def ended(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Shows the results of an epoch, unless the bar has shown them already."""
        if self._bar is None or epoch < self._epoch:
            return
        self._move(self._schedule.steps)
        self._bar.on_epoch_end(epoch, dict(logs))
        self._epoch, self._begun, self._step = epoch + 1, False, 0

    def _move(self, step: int) -> None:
        if not self._begun:
            self._bar.on_epoch_begin(self._epoch)
            self._begun = True
        if step > self._step:
            self._bar.on_train_batch_end(step - 1, {})
            self._step = step

    def _results(self) -> dict[int, dict[str, float]]:
        """Returns the training results of epochs by number, as far as they are known."""
        found = {}
        try:
            with self._history.open(newline="") as file:
                for row in csv.DictReader(file):
                    results = {
                        name: float(value)
                        for name, value in row.items()
                        if value and name not in _OTHERS
                    }
                    if results:
                        found[self._schedule.first + int(row["epoch"]) - 1] = results
        except FileNotFoundError:
            pass
        return found
