"""Where the time of a worker's steps goes: ``worker run --step-times FILE``."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Part = Literal["data", "compute", "push_pull", "pull", "push", "commit"]

PARTS: tuple[Part, ...] = ("data", "compute", "push_pull", "pull", "push", "commit")
"""What a step is made of, in the order of the columns. Async steps have ``push_pull``, sync steps
``pull`` (0 where the parameters were there already), ``push`` and ``commit``."""

COLUMNS = ("start_s", *(f"{part}_s" for part in PARTS))
"""The header of the file; load-bearing."""

_PLACE = {part: place for place, part in enumerate(PARTS, start=1)}
_WIDTH = len(COLUMNS)


class StepTimes:
    """The times of the last ``capacity`` steps, in memory that is allocated once.

    The thread of the loop calls ``begin``, then ``took`` after each part, then ``end``; a step
    that does not come to its end is not kept. Another thread may ``write`` meanwhile.
    """

    def __init__(
        self, capacity: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` gives seconds; on one host, monotonic clocks of processes agree."""
        # One place more than is kept: that of the step under way.
        self._places = capacity + 1
        self._clock = clock
        self._rows = array("d", bytes(8 * _WIDTH * self._places))
        self._steps = 0
        self._at = 0
        self._last = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._at = at = self._steps % self._places * _WIDTH
        self._last = self._rows[at] = self._clock()
        for place in range(at + 1, at + _WIDTH):
            self._rows[place] = 0.0

    def took(self, part: Part) -> None:
        """The time since the last call belongs to ``part``."""
        now = self._clock()
        self._rows[self._at + _PLACE[part]] += now - self._last
        self._last = now

    def end(self) -> None:
        """The step counts."""
        self._steps += 1

    def rows(self) -> list[tuple[float, ...]]:
        """The steps that are kept, oldest first, each in the order of ``COLUMNS``."""
        steps = self._steps
        first = max(0, steps + 1 - self._places)
        starts = (step % self._places * _WIDTH for step in range(first, steps))
        return [tuple(self._rows[start : start + _WIDTH]) for start in starts]

    def write(self, path: Path) -> None:
        """Writes a CSV file of ``rows``, in seconds.

        Raises:
            OSError: the file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(",".join(COLUMNS) + "\n")
            for row in self.rows():
                file.write(",".join(f"{value:.6f}" for value in row) + "\n")
