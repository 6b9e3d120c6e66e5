"""A coordinator's work on its disk, in simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from coordinator.checkpoints import Checkpoints
from coordinator.disk import Choice, Committed, Warnings, choose, commit, retain
from coordinator.run import Run
from coordinator.snapshots import Taken
from coordinator.work import SnapshotOrder
from tests.sim.disk import View
from tests.sim.schedule import Process

DISK_S = (0.001, 0.5)
"""How long a piece of work on the disk takes."""


class SlowDisk:
    """A :class:`coordinator.disk.DiskWork` in simulated time, one piece after the other."""

    def __init__(self, process: Process, storage: View, run: Run, counts: Counter[str]) -> None:
        self._process = process
        self._counts = counts
        self._storage = storage
        self._run = run
        self._checkpoints = Checkpoints(run, storage)
        self._free_at = 0.0

    def prepare(self, order: SnapshotOrder) -> None:
        """See :class:`coordinator.disk.DiskWork`."""
        self._checkpoints.prepare(order)

    def discard(self, order: SnapshotOrder) -> None:
        """See :class:`coordinator.disk.DiskWork`."""
        self._checkpoints.discard(order)

    def commit(
        self,
        taken: Taken,
        generation: int,
        scores: Mapping[tuple[int, int], float],
        in_use: Collection[str],
        done: Callable[[Committed], None],
    ) -> None:
        """See :class:`coordinator.disk.DiskWork`."""

        def work() -> None:
            done(commit(self._checkpoints, taken, generation, scores, in_use))

        self._soon(work)

    def retain(
        self,
        scores: Mapping[tuple[int, int], float],
        in_use: Collection[str],
        done: Callable[[Warnings], None],
    ) -> None:
        """See :class:`coordinator.disk.DiskWork`."""
        self._soon(lambda: done(retain(self._checkpoints, scores, in_use)))

    def choose(self, refused: Mapping[str, str], done: Callable[[Choice], None]) -> None:
        """See :class:`coordinator.disk.DiskWork`."""

        def work() -> None:
            choice = choose(self._run, refused, self._storage)
            if choice.chosen is not None and choice.chosen.remarks:
                self._counts["fall-backs"] += 1
            done(choice)

        self._soon(work)

    def _soon(self, work: Callable[[], None]) -> None:
        schedule = self._process.schedule
        now = schedule.now()
        self._free_at = max(self._free_at, now) + schedule.random.uniform(*DISK_S)
        schedule.after(self._free_at - now, self._process, work)
