"""Handles snapshots that all shards have taken: commits them, counts them or gives them up.

Deterministic: it asks the disk, which calls back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from coordinator.checkpoints.disk import DiskWork, WrittenManifest
from coordinator.checkpoints.snapshots import Failed, Taken
from coordinator.training.job_state import JobState
from psrpc.core.names import CHECKPOINTS
from psrpc.ops.logs import get_logger

log = get_logger()

DAMAGED = "it was read back, and is not what was written"


class Checkpointing:
    """The checkpoints of a run on disk. Not thread-safe."""

    def __init__(
        self,
        job: JobState,
        disk: DiskWork,
        newest: tuple[str, int, int] | None,
        advance: Callable[[], None],
    ) -> None:
        """``newest`` is the checkpoint recorded last: name, generation, global step. ``advance``
        moves the job on as far as its state allows."""
        self._newest = f"{CHECKPOINTS}/{newest[0]}" if newest else ""
        self._job = job
        self._advance = advance
        self._disk = disk

    @property
    def newest(self) -> str:
        """The checkpoint committed last, relative to the run directory; empty if there is none, or
        if the run directory is gone."""
        return "" if self._disk.gone else self._newest

    def restored(self, source: str) -> None:
        """Notes that the run continues from the checkpoint ``source``; empty for none."""
        self._newest = source or self._newest

    def reported(self, outcome: Taken | Failed | None) -> None:
        """Handles the outcome of the last report on a snapshot."""
        training = self._job.training
        if isinstance(outcome, Taken):
            outcome = training.orders.checked(outcome)
        if isinstance(outcome, Failed):
            training.orders.failed(outcome)
        elif outcome is not None and outcome.order.write:
            generation = self._job.run.generation
            self._disk.commit(outcome, generation, self._scores, self._in_use, self._committed)
            return
        elif outcome is not None:
            training.orders.taken(outcome.order)
        self._advance()

    def evaluated(self, worker: str, evaluation: str, values: Mapping[str, float]) -> None:
        """Records an evaluation's results, from ``worker``. Raises InvalidArgument."""
        self._job.training.epochs.merged(worker, evaluation, values)
        if self._job.run.description.keep_best is not None:
            # The checkpoint was kept until it was evaluated, and the best one may have changed.
            self._disk.retain(self._scores, self._in_use, self._warn)

    @property
    def _scores(self) -> Mapping[tuple[int, int], float]:
        """The evaluation results by which checkpoints are compared."""
        job = self._job
        return job.training.notes.scores(job.run.description.keep_best)

    @property
    def _in_use(self) -> tuple[str, ...]:
        """Names of checkpoints that are still to be evaluated or restored."""
        job = self._job
        return (*job.training.orders.evaluations.snapshots, job.generations.restoring)

    def _warn(self, warnings: Sequence[str]) -> None:
        self._job.warnings.add(*warnings)

    def _committed(self, result: WrittenManifest) -> None:
        """Handles the result of a commit; the generation may have changed since."""
        job = self._job
        order, training = result.taken.order, job.training
        self._warn(result.warnings)
        error = result.error or (DAMAGED if result.damaged else "")
        if not error:
            self._newest = f"{CHECKPOINTS}/{order.name}"
            log.info("checkpoint committed", checkpoint=self._newest)
            training.notes.note_checkpoint(order, result.generation)
            if result.generation == job.begun:
                training.orders.taken(order)
        elif job.stands(result.generation):
            training.orders.failed(Failed(order, error), damaged=result.damaged)
        else:
            self._disk.discard(order)
        self._advance()
