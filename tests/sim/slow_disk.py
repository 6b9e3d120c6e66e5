"""A coordinator's work on its disk, in simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from coordinator.disk import Choice, DiskWork, Result
from coordinator.run import Run
from tests.sim.disk import View
from tests.sim.schedule import Process

DISK_S = (0.001, 0.5)
"""How long a piece of work on the disk takes."""


class SlowDisk(DiskWork):
    """Takes simulated time, one piece after the other."""

    def __init__(self, process: Process, storage: View, run: Run, counts: Counter[str]) -> None:
        super().__init__(run, storage)
        self._process = process
        self._counts = counts
        self._free_at = 0.0

    def start(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """See :class:`coordinator.disk.DiskWork`."""
        schedule = self._process.schedule
        now = schedule.now()
        self._free_at = max(self._free_at, now) + schedule.random.uniform(*DISK_S)
        schedule.after(self._free_at - now, self._process, lambda: done(work()))

    def choose(self, refused: Mapping[str, str], done: Callable[[Choice], None]) -> None:
        """See :class:`coordinator.disk.DiskWork`. Counts how often it is not the newest."""

        def chosen(choice: Choice) -> None:
            if choice.chosen is not None and choice.chosen.remarks:
                self._counts["fall-backs"] += 1
            done(choice)

        super().choose(refused, chosen)
