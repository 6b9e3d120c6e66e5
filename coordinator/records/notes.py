"""Records of a job that it can do without: results, checkpoints, the first loss, warnings.

Deterministic; the store is the only side effect.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Protocol

from coordinator.core.retention import Objective
from coordinator.core.wording import not_evaluated
from coordinator.records.store import Store
from coordinator.records.stored_values import FIRST_LOSS
from psrpc.core.commands import SnapshotOrder
from psrpc.ops.logs import get_logger

log = get_logger()

KEPT = 50
"""Most warnings that are kept, the newest."""


class Notes:
    """Stores these records. Warns of those that the disk refuses; a later :meth:`retry` stores
    them. Not thread-safe."""

    def __init__(self, store: Store, warnings: JobWarnings) -> None:
        """Raises sqlite3.Error."""
        self._store = store
        self._warnings = warnings
        self.results = store.evaluations()
        """All evaluations so far: name, global step, values."""
        self.first_loss: float | None = store.get(FIRST_LOSS)
        """The mean loss of the job's first window; None until it is known."""
        self._unstored: dict[str, Callable[[], None]] = {}
        self._scores: dict[tuple[int, int], float] = {}

    def note_checkpoint(self, order: SnapshotOrder, generation: int) -> None:
        """Records a checkpoint committed in this generation or an earlier one."""
        self.store_soon(
            f"checkpoint {order.name}",
            lambda: self._store.put_checkpoint(order.name, generation, order.global_step),
        )

    def note_evaluation(
        self, evaluation: str, generation: int, global_step: int, values: Mapping[str, float]
    ) -> None:
        """Records an evaluation's results, replacing earlier ones of that name."""
        row = (evaluation, global_step, dict(values))
        self.store_soon(
            f"evaluation {evaluation}",
            lambda: self._store.put_evaluation(row[0], generation, row[1], row[2]),
        )
        self.results = [*(r for r in self.results if r[0] != evaluation), row]

    def note_first_loss(self, loss: float | None) -> None:
        """Records the loss with which the guard compares later ones."""
        if loss != self.first_loss:
            self.first_loss = loss
            self.store_soon("the first loss", lambda: self._store.put(FIRST_LOSS, loss))

    def scores(self, best: Objective | None) -> dict[tuple[int, int], float]:
        """Returns the evaluation results by which checkpoints are compared, by generation and
        global step; the last known ones if the store cannot be read."""
        try:
            self._scores = self._store.scores(best.metric) if best else {}
        except sqlite3.Error as error:
            self._warnings.add(
                f"results cannot be read: {error}; the best checkpoint may be another"
            )
        return self._scores

    def retry(self) -> None:
        """Stores the records that the disk refused. Call it periodically."""
        for what, store in list(self._unstored.items()):
            self.store_soon(what, store)

    def store_soon(self, what: str, store: Callable[[], None]) -> None:
        """Calls ``store``, and again later if the disk refuses; ``what`` names the item."""
        try:
            store()
        except sqlite3.Error as error:
            self._unstored[what] = store
            self._warnings.add(f"{what} cannot be stored: {error}; tried again")
        else:
            self._unstored.pop(what, None)


class NotEvaluated(str):
    """A warning that an epoch, which counts from 0, has no evaluation. Warnings with the same
    reason are merged."""

    def __new__(cls, epoch: int, why: str) -> NotEvaluated:
        """``why`` ends the text: a colon and the reason."""
        made = super().__new__(cls, not_evaluated(1, epoch + 1, why))
        made.epoch, made.why = epoch, why
        return made

    epoch: int
    why: str


class Noticing(Protocol):
    """A part of the job that collects warnings instead of logging them."""

    warnings: list[str]


class JobWarnings:
    """Logs and keeps each warning, but not again while it is kept. Not thread-safe."""

    def __init__(self) -> None:
        self._epochs: dict[str, set[int]] = {}
        self._lines: dict[str, str] = {}
        """By reason: the epochs without evaluation, and the warning that is kept of them."""
        self.kept: list[str] = []
        """The warnings that are kept, in order of arrival. Every addition replaces the list, so a
        reader may keep the one that it has."""

    def add(self, *warnings: str) -> None:
        """Adds warnings."""
        for warning in warnings:
            if isinstance(warning, NotEvaluated):
                self._count(warning)
            elif warning not in self.kept:
                log.warning(warning)
                self.kept = [*self.kept, warning][-KEPT:]

    def _count(self, warning: NotEvaluated) -> None:
        epochs = self._epochs.setdefault(warning.why, set())
        if warning.epoch in epochs:
            return
        log.warning(warning)
        epochs.add(warning.epoch)
        line = not_evaluated(len(epochs), max(epochs) + 1, warning.why)
        before = self._lines.get(warning.why)
        self._lines[warning.why] = line
        if before in self.kept:
            # Replaced in place, so that other warnings do not move behind it.
            self.kept = [line if kept == before else kept for kept in self.kept]
        else:
            self.kept = [*self.kept, line][-KEPT:]

    def take(self, part: Noticing) -> None:
        """Takes the warnings that ``part`` has collected since the last call."""
        noticed, part.warnings = part.warnings, []
        self.add(*noticed)
