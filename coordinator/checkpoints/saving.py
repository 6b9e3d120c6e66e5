"""Decides when snapshots are due: periodic checkpoints, a state per epoch to evaluate, the end.

A job that keeps its best checkpoint also writes the states that it evaluates.

Pure: the engine's loop is the only caller.
"""

from __future__ import annotations

from collections import deque

from coordinator.checkpoints.cadence import Cadence, FinalState
from coordinator.checkpoints.snapshots import (
    Failed,
    Snapshots,
    checkpoint_name,
    is_checkpoint,
    suffix,
    temporary_directory,
)
from coordinator.records.notes import NotEvaluated
from coordinator.schedule.evaluation import FINAL, Evaluations, evaluation_of
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import CheckpointError
from psrpc.core.tables import FULL_EVERY

MAX_WRITTEN = 2
"""Checkpoints that may be written at once; shards accept no more."""


class Saving:
    """Orders the snapshots of one generation, one at a time. At most one checkpoint is being
    written, with one exception: a round's decision cannot wait, so the final checkpoint of a sync
    job, and that of an epoch to be evaluated, may be written beside another. If two are being
    written, the final one waits, since its state does not change. ``final`` is that state."""

    def __init__(
        self,
        *,
        snapshots: Snapshots,
        evaluations: Evaluations,
        cadence: Cadence,
        last_epoch: int,
        evaluates: bool,
        saved_step: int | None,
        first_saved: bool,
        generation: int = 1,
        writes_epochs: bool = False,
        full_every: int = FULL_EVERY,
    ) -> None:
        """``cadence`` says when a checkpoint is due. ``saved_step`` is the step of a checkpoint of
        the shards' present state, if any; ``first_saved`` whether there ever was a checkpoint.
        ``writes_epochs`` makes evaluated states checkpoints. One checkpoint in ``full_every``
        contains all table rows itself, without files of earlier ones."""
        self._snapshots = snapshots
        self._evaluations = evaluations
        self._cadence = cadence
        self._last_epoch = last_epoch
        self._evaluates = evaluates
        self._saved_step = saved_step
        self._generation = generation
        self._writes_epochs = writes_epochs
        self._full_every = full_every
        self._written_step: int | None = None
        self._written = ""
        """Step and name of the checkpoint that was ordered last."""
        self._asked: dict[int, int] = {}
        """By epoch, how often its evaluation was requested again."""
        self.final = FinalState()
        self._lost: tuple[int, int] = (0, 0)
        """Number of failed checkpoints besides final ones, and the latest step of any."""
        self._due = False
        self._epochs: deque[int] = deque()
        self._first: str | None = None
        self._why = ""
        """Why the previous checkpoint failed; empty once one is committed."""
        self._done: set[str] = set()
        if first_saved:
            self._first = ""
            self._done.add(self._first)
        self.warnings: list[str] = []
        self.base = ""
        """The checkpoint that the next one may continue, relative to the run directory."""

    @property
    def first_saved(self) -> bool:
        """Whether the initial state of training is on disk."""
        return self._first in self._done

    @property
    def owes(self) -> bool:
        """Whether a snapshot is due that waits for the next round's decision."""
        return self._due or bool(self._epochs)

    def orders_at(self, step: int) -> int | None:
        """Returns the first step after ``step`` at which a checkpoint will be due; None if none is
        due by steps."""
        every = self._cadence.every.steps
        return None if every is None else (step // every + 1) * every

    @property
    def final_evaluated(self) -> bool:
        """Whether no evaluation is left to do, including the final one."""
        return self.final.name is not None and self._evaluations.idle

    def order_first(self, step: int) -> SnapshotOrder | None:
        """Orders the checkpoint that training begins with, once. Its ``step`` is 0, or later if the
        shards kept their state although the store has no record of a checkpoint."""
        if self._first is not None:
            return None
        self._first = self._written = self._name(step)
        self._saved_step = self._written_step = step
        return self._order(self._first, step, write=True, keep=False, by_decision=False)

    def stepped(self, before: int, after: int, finished_epochs: list[int]) -> None:
        """Notes the global step's advance from ``before`` to ``after`` and the finished epochs."""
        self._cadence.stepped(before, after)
        if after > before and self._cadence.verdict.due:
            self._due = True
        if self._evaluates:
            # The last epoch's evaluation is the final one.
            self._epochs += [e for e in finished_epochs if e < self._last_epoch]

    def evaluate(self, epoch: int) -> None:
        """Requests the evaluation (again) of the state of ``epoch``, which the shards still
        have."""
        if epoch not in self._epochs:
            self._epochs.append(epoch)
            # Counted, so that a repeated evaluation gets another name.
            self._asked[epoch] = self._asked.get(epoch, 0) + 1

    def look(self, step: int) -> None:
        """Requests a checkpoint if time has made one due. Call it periodically during training,
        with the global step."""
        if not self._due and self._cadence.verdict.due:
            self.request(step)

    def request(self, step: int) -> bool:
        """Requests a checkpoint of now; returns whether one will be ordered. False if one of this
        step was ordered already."""
        if step in (self._saved_step, self._written_step):
            return False
        self._due = True
        return True

    def stands_at(self, step: int) -> None:
        """Notes that the state that the shards began with, of ``step``, is on disk."""
        self._saved_step = step

    def began_with(self, step: int) -> bool:
        """Whether there was a checkpoint of ``step`` before any was ordered here."""
        return step == self._saved_step and self._first == ""

    def next_order(
        self, step: int, trained: bool, by_decision: bool = False
    ) -> SnapshotOrder | None:
        """Returns the order that is due at the global ``step``. Call it until it returns None, or
        once per decision."""
        busy = self._snapshots.writing
        final_due = trained and self.final.due
        if final_due and step == self._written_step and self._written not in self._done:
            return None  # it is being saved
        if final_due and busy < (MAX_WRITTEN if by_decision else 1):
            return self._order_final(step, by_decision)
        write = self._due and not trained and not busy
        evaluation, keep, again = "", False, ""
        if self._epochs and not (trained and by_decision):
            write_epoch = write
            if self._writes_epochs and not trained and step != self._written_step:
                if busy and not by_decision and len(self._epochs) == 1:
                    return None  # async: it can be ordered a little later
                write_epoch = busy < (MAX_WRITTEN if by_decision else 1)
            epoch = self._epochs.popleft()
            evaluation = evaluation_of(epoch)
            again = f".r{self._asked[epoch]}" if epoch in self._asked else ""
            keep = self._keeps(epoch, write_epoch)
            write = write or (keep and write_epoch)
        if not (write or keep):
            return None
        kept = f"{evaluation}{suffix(self._generation)}{again}"
        name = self._name(step) if write else kept
        if write:
            self._due = False
            self._written_step, self._written = step, name
        if keep:
            self._evaluations.add(evaluation, name, step)
        return self._order(name, step, write, keep, by_decision)

    def taken(self, name: str) -> None:
        """Notes that every shard has the snapshot, and that it is committed if it was written."""
        self._done.add(name)
        self.final.taken(name)
        self._why = "" if is_checkpoint(name) else self._why
        self._cadence.committed(name)
        self.warnings += self._cadence.take_remarks()

    def failed(self, failed: Failed) -> str | None:
        """Handles a failed snapshot; returns why the job must stop, or None if a warning will do.
        The job stops without its first checkpoint, since training needs that; the final one is
        tried again."""
        order = failed.order
        self._cadence.failed(order.name)
        dropped = self._evaluations.drop(order.name)
        if order.name == self.final.name:
            warning = self.final.failed(failed.reason)
            self.warnings += [warning] if warning else []
            return None
        if order.name == self._first:
            why = CheckpointError(failed.reason)
            return f"{why.code}: snapshot {order.name} could not be taken: {why}"
        if order.write:
            # Two are written at once, and the later may fail first.
            self._lost = (self._lost[0] + 1, max(self._lost[1], order.global_step))
            if order.global_step == self._written_step:
                self._written_step = None
        lost = f"; not evaluated: {', '.join(dropped)}" if dropped else ""
        known = failed.reason == self._why
        self._why = failed.reason if order.write else self._why
        if not known:
            self.warnings.append(f"snapshot {order.name} failed: {failed.reason}{lost}")
        elif lost:
            self.warnings.append(f"snapshot {order.name} failed for the same reason{lost}")
        return None

    def withdrawn(self, order: SnapshotOrder) -> None:
        """Undoes an order that was not sent, and drops whatever would wait for it."""
        self._cadence.withdrawn(order.name)
        self._evaluations.drop(order.name)
        self.final.withdrawn(order.name)
        if order.write and order.global_step == self._written_step:
            self._written_step = None

    def _keeps(self, epoch: int, written: bool) -> bool:
        """Whether the shards have room to keep an epoch's state; warns if they do not."""
        # One place is left free for the final state.
        if self._snapshots.room <= 1:
            unkept = ", so it cannot be kept as the best one" if self._writes_epochs else ""
            self.warnings.append(
                NotEvaluated(
                    epoch,
                    f"{unkept}: the evaluations of earlier epochs still run; with "
                    "evaluate_every_epoch=True epochs wait for them",
                )
            )
            return False
        if self._writes_epochs and not written:
            self.warnings.append(
                f"epoch {epoch + 1} is evaluated, but cannot be kept as the best one: earlier "
                "checkpoints are still written"
            )
        return True

    def _name(self, step: int) -> str:
        times, lost_step = self._lost
        again = f".r{times}" if times and step == lost_step else ""
        return checkpoint_name(step, self._generation) + again

    def _order_final(self, step: int, by_decision: bool) -> SnapshotOrder | None:
        saved = step in (self._saved_step, self._written_step)
        evaluates = self._evaluates and not self.final.known
        name = FINAL + suffix(self._generation) if saved else self._name(step)
        name = self.final.order(name)
        if saved and not evaluates:
            self.final.taken(name)
            return None
        if evaluates:
            self._evaluations.add(FINAL, name, step)
        return self._order(name, step, not saved, evaluates, by_decision)

    def _order(
        self, name: str, step: int, write: bool, keep: bool, by_decision: bool
    ) -> SnapshotOrder:
        directory = temporary_directory(name) if write else ""
        base = self.base if write else ""
        order = SnapshotOrder(name, step, write, keep, directory, base, self._full_every)
        self._snapshots.order(order, by_decision)
        if write:
            self._cadence.ordered(name)
        return order
