"""What becomes of the snapshots that all shards have taken: committed, counted or given up.

Deterministic: it acts on its course and asks the disk, which calls back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coordinator.disk import Committed, DiskWork
from coordinator.snapshots import Failed, Taken
from psrpc.logs import get_logger
from psrpc.runs import CHECKPOINTS

if TYPE_CHECKING:
    from coordinator.course import Course

log = get_logger()

DAMAGED = "it was read back, and is not what was written"


class Checkpointing:
    """The checkpoints of a run that are on the disk. Not thread-safe."""

    def __init__(self, course: Course, disk: DiskWork, newest: tuple[str, int, int] | None) -> None:
        """``newest`` is the checkpoint that was noted last: name, generation, global step."""
        self._newest = f"{CHECKPOINTS}/{newest[0]}" if newest else ""
        self._course = course
        self._disk = disk

    @property
    def newest(self) -> str:
        """The last one that was committed, relative to the run directory; empty if there is none,
        or the run directory is gone."""
        return "" if self._disk.gone else self._newest

    def restored(self, source: str) -> None:
        """The run went on from ``source``; empty where it did from no checkpoint."""
        self._newest = source or self._newest

    def reported(self, outcome: Taken | Failed | None) -> None:
        """What the last report on a snapshot came to."""
        training = self._course.training
        if isinstance(outcome, Taken):
            outcome = training.orders.checked(outcome)
        if isinstance(outcome, Failed):
            training.orders.failed(outcome)
        elif outcome is not None and outcome.order.write:
            generation = self._course.run.generation
            self._disk.commit(outcome, generation, self._scores, self._in_use, self._committed)
            return
        elif outcome is not None:
            training.orders.taken(outcome.order)
        self._course.advance()

    def evaluated(self, worker: str, evaluation: str, values: Mapping[str, float]) -> None:
        """An evaluation's results, by ``worker``. Raises InvalidArgument."""
        self._course.training.merged(worker, evaluation, values)
        if self._course.run.description.keep_best is not None:
            # Its checkpoint was kept for it, and the best one may be another now.
            self._disk.retain(self._scores, self._in_use, self._warn)

    @property
    def _scores(self) -> Mapping[tuple[int, int], float]:
        """By which checkpoints are compared."""
        course = self._course
        return course.training.notes.scores(course.run.description.keep_best)

    @property
    def _in_use(self) -> tuple[str, ...]:
        """Names of checkpoints that are still to be evaluated or restored."""
        course = self._course
        return (*course.training.orders.evaluations.snapshots, course.generations.restoring)

    def _warn(self, warnings: Sequence[str]) -> None:
        self._course.warnings.add(*warnings)

    def _committed(self, result: Committed) -> None:
        """A manifest was written, or could not be; the generation may be another since."""
        course = self._course
        order, training = result.taken.order, course.training
        self._warn(result.warnings)
        error = result.error or (DAMAGED if result.damaged else "")
        if not error:
            self._newest = f"{CHECKPOINTS}/{order.name}"
            log.info("checkpoint committed", checkpoint=self._newest)
            training.notes.note_checkpoint(order, result.generation)
            if result.generation == course.begun:
                training.orders.taken(order)
        elif course.stands(result.generation):
            training.orders.failed(Failed(order, error), damaged=result.damaged)
        else:
            self._disk.discard(order)
        course.advance()
