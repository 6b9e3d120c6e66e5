"""A coordinator's work on its disk, in simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from coordinator.checkpoints.disk import DiskChoice, DiskWork, Result
from coordinator.core.run import Run
from tests.sim.disk import View
from tests.sim.schedule import Process

DISK_S = (0.001, 0.5)
"""How long a piece of work on the disk takes."""


class SlowDisk(DiskWork):
    """Takes simulated time."""

    def __init__(self, process: Process, storage: View, run: Run, counts: Counter[str]) -> None:
        super().__init__(run, storage)
        self._process = process
        self._counts = counts

    def begin(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """See :class:`coordinator.checkpoints.disk.DiskWork`."""
        schedule = self._process.schedule

        def end() -> None:
            done(work())
            self.over()

        schedule.after(schedule.random.uniform(*DISK_S), self._process, end)

    def choose(self, refused: Mapping[str, str], done: Callable[[DiskChoice], None]) -> None:
        """See :class:`coordinator.checkpoints.disk.DiskWork`. Counts how often it is not the
        newest."""

        def chosen(choice: DiskChoice) -> None:
            if choice.chosen is not None and choice.chosen.remarks:
                self._counts["fall-backs"] += 1
            done(choice)

        super().choose(refused, chosen)
