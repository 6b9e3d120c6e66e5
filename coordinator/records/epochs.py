"""The results of each finished epoch: loss and metrics, of training and evaluation.

Deterministic; the only side effects are on the ledger and ``history.csv``.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.core.run import Run, global_step
from coordinator.records.notes import JobWarnings
from coordinator.records.store import Store
from psrpc.core.text import counted
from psrpc.files.storage import replace_text

ROWS_PER_S = 2000.0
"""Most rows written to the file per second: each write replaces the whole file."""


@dataclass(frozen=True, slots=True)
class EpochRow:
    """One epoch, which counts from 0; ``step`` is the global step at which it and all epochs before
    it are done. Unknown results are empty; a learning rate is None under a schedule; ``checkpoint``
    is the name of the checkpoint that was evaluated, if any. ``eval_step`` is the global step of
    the evaluated state, which without rounds may be later than ``step``."""

    epoch: int
    step: int
    training: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    checkpoint: str = ""
    eval_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON types, though a loss may be NaN."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "training": dict(self.training),
            "evaluation": dict(self.evaluation),
            "learning_rate": self.learning_rate,
            "checkpoint": self.checkpoint,
            "eval_step": self.eval_step,
        }

    def flat(self) -> dict[str, float | None]:
        """Returns the row as users see it: epochs from 1, evaluation results prefixed ``val_``, as
        in Keras's history."""
        return {
            "epoch": self.epoch + 1,
            "step": self.step,
            **self.training,
            **{f"val_{name}": value for name, value in self.evaluation.items()},
            **({} if self.eval_step is None else {"eval_step": self.eval_step}),
            "learning_rate": self.learning_rate,
        }


class EpochHistory:
    """The finished epochs, one row each. Not thread-safe.

    An epoch that is repeated, since shards lost its effect, gets a new row.
    """

    def __init__(
        self,
        path: Path | None,
        store: Store,
        store_soon: Callable[[str, Callable[[], None]], None],
        warnings: JobWarnings,
    ) -> None:
        """Reads the stored rows. ``path`` is the file, or None; ``store_soon`` calls its argument,
        and again later if the disk refuses. Raises sqlite3.Error."""
        self._path = path
        self._store = store
        self._store_soon = store_soon
        self._warnings = warnings
        self._rows = {row["epoch"]: EpochRow(**row) for row in store.epochs()}
        self._dirty = False
        self._written = -math.inf

    @property
    def rows(self) -> list[EpochRow]:
        """All rows, in order."""
        return [self._rows[epoch] for epoch in sorted(self._rows)]

    def begin(self, finished: Collection[int], run: Run) -> None:
        """Keeps the rows of the ``finished`` epochs in the shards' present state, and forgets
        others, whose history was lost. Raises sqlite3.Error: nothing has changed."""
        lost = self._rows.keys() - set(finished)
        if lost:
            self._store.forget_epochs(lost)
        self._rows = {epoch: row for epoch, row in self._rows.items() if epoch not in lost}
        self._dirty = True
        self.finished(finished, run)

    def finished(self, epochs: Collection[int], run: Run) -> None:
        """Adds rows for finished epochs under the present policy of ``run``."""
        for epoch in epochs:
            if epoch not in self._rows:
                description = run.description
                batches = (epoch + 1) * description.per_epoch
                step = global_step(run.followed, batches, description.per_epoch)
                self._put(EpochRow(epoch, step, learning_rate=learning_rate(run, epoch)))

    def lacks_training(self, epoch: int) -> bool:
        """Whether an epoch is finished but its training results are unknown."""
        return epoch in self._rows and not self._rows[epoch].training

    def trained(self, epoch: int, values: Mapping[str, float]) -> EpochRow | None:
        """Sets the training results of an epoch; returns its row, if it is finished."""
        row = self._rows.get(epoch)
        if row is not None:
            row = replace(row, training=dict(values))
            self._put(row)
        return row

    def evaluated(
        self,
        epoch: int,
        values: Mapping[str, float],
        checkpoint: str = "",
        eval_step: int | None = None,
    ) -> None:
        """Sets the evaluation results of an epoch, the checkpoint with the evaluated state, empty
        if there is none, and its global step."""
        row = self._rows.get(epoch)
        if row is not None:
            self._put(
                replace(row, evaluation=dict(values), checkpoint=checkpoint, eval_step=eval_step)
            )

    def write(self, now: float | None = None) -> None:
        """Writes the file if there is news and it is time; without ``now`` it always is."""
        if not self._dirty or self._path is None:
            return
        if now is not None:
            if now - self._written < len(self._rows) / ROWS_PER_S:
                return
            self._written = now
        self._dirty = False
        try:
            replace_text(self._path, as_csv(self.rows))
        except OSError as error:
            self._dirty = True
            self._warnings.add(f"{self._path} cannot be written: {error.strerror}; tried again")

    def _put(self, row: EpochRow) -> None:
        self._rows[row.epoch] = row
        self._dirty = True
        self._store_soon(f"the history of epoch {row.epoch + 1}", lambda: self._keep(row.epoch))

    def _keep(self, epoch: int) -> None:
        """Stores the present row of an epoch, if any: by the time of a retry, shards may have lost
        the epoch."""
        row = self._rows.get(epoch)
        if row is not None:
            self._store.put_epoch(epoch, row.to_json())


def as_csv(rows: Sequence[EpochRow]) -> str:
    """Formats a table with a line per epoch: epoch, step, training results, evaluation results
    prefixed ``val_``, the step of the evaluated state, and the learning rate; unknown is empty."""
    flat = [row.flat() for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    first = ["epoch", "step"]
    last = ["eval_step"] if "eval_step" in names else []
    last.append("learning_rate")
    values = [name for name in names if name not in (*first, *last)]
    # Rows with additional results may come last.
    values.sort(key=lambda name: (name.startswith("val_"), name.removeprefix("val_") != "loss"))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*first, *values, *last], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def learning_rate(run: Run, epoch: int) -> float | None:
    """Returns the learning rate of an epoch under the present policy of ``run``; None under a
    schedule, and during warmup."""
    rate = first_learning_rate(run)
    if rate is None or (run.warmup_updates and epoch < run.description.warmup_epochs):
        return None
    # Keras stores rates as float32: 0.1 becomes 0.10000000149011612.
    return float(f"{rate * run.followed[-1].rate:.7g}")


def reduced_rate(run: Run, index: int) -> str:
    """Says to which value, and why, the policy at ``index`` of ``run.followed`` changed the
    learning rate; empty if it did not change it."""
    now, reduce = run.followed[index], run.description.reduce_lr
    first = first_learning_rate(run)
    if (
        reduce is None
        or first is None
        or now.rate == (run.followed[index - 1].rate if index else 1)
    ):
        return ""
    epoch = now.batches // run.description.per_epoch + 1
    return (
        f"learning rate {first * now.rate:.4g} from epoch {epoch} on "
        f"(val_{reduce.objective.metric} has not improved for "
        f"{counted(max(reduce.patience, 1), 'epoch')})"
    )


def first_learning_rate(run: Run) -> float | None:
    """Returns the learning rate of ``run`` after warmup and before reductions; with local steps,
    the rate of the workers. None under a schedule."""
    if run.description.local_steps > 1:
        return run.description.local_learning_rate
    rate = run.description.optimizer.get("config", {}).get("learning_rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        return None
    return float(rate) * run.micro_batches
