"""When a snapshot is due: checkpoints every N steps, a frozen state per epoch to evaluate, the end.

Pure: the engine's loop is the only caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coordinator.evaluation import Evaluations
from coordinator.snapshots import Failed, Snapshots
from coordinator.work import SnapshotOrder

CHECKPOINTS = "checkpoints"
"""Below the run directory. Load-bearing."""

FINAL = "final"
"""Name of the last evaluation."""


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint of a global step; names sort by step."""
    return f"step-{step:08d}"


def temporary_directory(name: str) -> str:
    """Where shards write a checkpoint before it is committed, relative to the run directory."""
    return f"{CHECKPOINTS}/.tmp-{name}"


@dataclass(slots=True)
class _Due:
    checkpoint: bool = False
    final: bool = False


class Saving:
    """Orders snapshots one at a time. At most one checkpoint is being written, except that a
    round's decision never waits: the final one of a sync job goes out beside it."""

    def __init__(
        self,
        *,
        snapshots: Snapshots,
        evaluations: Evaluations,
        every: int,
        last_epoch: int,
        evaluates: bool,
        restored_step: int | None,
    ) -> None:
        """``every`` is in global steps. ``restored_step`` is the step of the checkpoint that the
        job goes on from."""
        self._snapshots = snapshots
        self._evaluations = evaluations
        self._every = every
        self._last_epoch = last_epoch
        self._evaluates = evaluates
        self._restored_step = restored_step
        self._due = _Due()
        self._epochs: deque[int] = deque()
        self._first: str | None = None
        self._final: str | None = None
        self._done: set[str] = set()
        if restored_step is not None:
            self._first = checkpoint_name(restored_step)
            self._done.add(self._first)
        self.warnings: list[str] = []

    @property
    def first_saved(self) -> bool:
        """Whether the state that training starts from is on the disk."""
        return self._first in self._done

    @property
    def final_saved(self) -> bool:
        """Whether the final state is on the disk (and kept, where it is evaluated)."""
        return self._final in self._done

    @property
    def final_evaluated(self) -> bool:
        """Whether no evaluation is left to do, the final one included."""
        return self._final is not None and self._evaluations.idle

    def order_first(self) -> SnapshotOrder | None:
        """The step-0 checkpoint, once."""
        if self._first is not None:
            return None
        self._first = checkpoint_name(0)
        return self._order(self._first, 0, write=True, keep=False, by_decision=False)

    def stepped(self, before: int, after: int, finished_epochs: list[int]) -> None:
        """The global step went from ``before`` to ``after``, and these epochs ended."""
        if before // self._every < after // self._every:
            self._due.checkpoint = True
        if self._evaluates:
            # The last epoch's evaluation is the final one.
            self._epochs += [e for e in finished_epochs if e < self._last_epoch]

    def next_order(
        self, step: int, trained: bool, by_decision: bool = False
    ) -> SnapshotOrder | None:
        """What is to be ordered now that the shards stand at ``step``; call it until it returns
        None, or once per decision."""
        if trained and self._final is None and (by_decision or not self._snapshots.writing):
            return self._order_final(step, by_decision)
        write = self._due.checkpoint and not trained and not self._snapshots.writing
        keep = False
        if self._epochs and not (trained and by_decision):
            # One place is left free for the final state.
            keep = self._snapshots.room > 1
            epoch = self._epochs.popleft()
            if not keep:
                self.warnings.append(
                    f"epoch {epoch} is not evaluated: the evaluations of earlier epochs still run"
                )
        if not (write or keep):
            return None
        name = checkpoint_name(step) if write else f"epoch-{epoch}"
        if write:
            self._due.checkpoint = False
        if keep:
            self._evaluations.add(f"epoch-{epoch}", name, step)
        return self._order(name, step, write, keep, by_decision)

    def taken(self, name: str) -> None:
        """Every shard has the snapshot, and if it was to be written it is committed."""
        self._done.add(name)

    def failed(self, failed: Failed) -> str | None:
        """A snapshot failed; why the job must stop for it, or None if a warning will do."""
        order = failed.order
        dropped = self._evaluations.drop(order.name)
        if order.name in (self._first, self._final):
            return f"snapshot {order.name} could not be taken: {failed.reason}"
        lost = f"; not evaluated: {', '.join(dropped)}" if dropped else ""
        self.warnings.append(f"snapshot {order.name} failed: {failed.reason}{lost}")
        return None

    def _order_final(self, step: int, by_decision: bool) -> SnapshotOrder | None:
        saved = step == self._restored_step
        self._final = FINAL if saved else checkpoint_name(step)
        if saved and not self._evaluates:
            self._done.add(self._final)
            return None
        if self._evaluates:
            self._evaluations.add(FINAL, self._final, step)
        return self._order(self._final, step, not saved, self._evaluates, by_decision)

    def _order(
        self, name: str, step: int, write: bool, keep: bool, by_decision: bool
    ) -> SnapshotOrder:
        directory = temporary_directory(name) if write else ""
        order = SnapshotOrder(name, step, write, keep, directory)
        self._snapshots.order(order, by_decision)
        return order
