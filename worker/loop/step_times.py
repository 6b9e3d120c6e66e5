"""Where a worker's time goes: in all, and step by step for ``worker run --step-times FILE``."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Literal

from psrpc.v1 import coordinator_pb2 as pb

Part = Literal["data", "compute", "push_pull", "pull", "push", "commit"]

PARTS: tuple[Part, ...] = ("data", "compute", "push_pull", "pull", "push", "commit")
"""What a step is made of, in the order of the columns. Async steps have ``push_pull``, sync steps
``pull`` (0 where the parameters were there already), ``push`` and ``commit``."""

COLUMNS = ("start_s", *(f"{part}_s" for part in PARTS))
"""The header of the file; load-bearing."""

Cause = Literal["data", "compute", "barrier", "network"]

_CAUSES: dict[Part, Cause] = {
    "data": "data",
    "compute": "compute",
    "push_pull": "network",
    "pull": "network",
    "push": "network",
    "commit": "barrier",
}
"""What the time of a part of a step counts as in all."""

MEDIAN_STEPS = 31
"""Steps whose median time is told to the coordinator."""

_PLACE = {part: place for place, part in enumerate(PARTS, start=1)}
_WIDTH = len(COLUMNS)


class StepTimes:
    """The times of the last ``capacity`` steps, in memory that is allocated once, and of all time.

    The thread of the loop calls ``begin``, then ``took`` after each part, then ``end``; a step
    that does not come to its end is not kept. Another thread may ``write`` meanwhile, or ask for
    the ``totals``, which have also what is spent between steps.
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
        # By place in a row, of all steps; then what was spent otherwise, by cause.
        self._sums = array("d", bytes(8 * _WIDTH))
        self._spent: dict[Cause, float] = dict.fromkeys(_CAUSES.values(), 0.0)
        self._apply_s = 0.0
        self._phase: pb.WorkerPosition.Phase = pb.WorkerPosition.PHASE_WAITING
        self._moves = 0
        # A ring of fixed size: a deque cannot be copied while another thread appends to it.
        self._lately = array("d", bytes(8 * MEDIAN_STEPS))

    def at(self, phase: pb.WorkerPosition.Phase) -> None:
        """What the thread of the loop does from now on."""
        self._phase = phase
        self._moves += 1

    def position(self) -> pb.WorkerPosition:
        """How far the loop has come. Any thread may ask."""
        lately = self._lately[: self._steps]
        return pb.WorkerPosition(
            phase=self._phase,
            position=self._moves,
            median_step_s=median(lately) if lately else 0.0,
        )

    def begin(self) -> None:
        """A step begins."""
        self._at = at = self._steps % self._places * _WIDTH
        self._last = self._rows[at] = self._clock()
        for place in range(at + 1, at + _WIDTH):
            self._rows[place] = 0.0

    def took(self, part: Part) -> float:
        """The time since the last call belongs to ``part``; how long that was, in seconds."""
        now = self._clock()
        seconds = now - self._last
        place = _PLACE[part]
        self._rows[self._at + place] += seconds
        self._sums[place] += seconds
        self._last = now
        return seconds

    def applied(self, seconds: float) -> None:
        """So much of the last part was the shards' update."""
        self._apply_s += seconds

    @contextmanager
    def outside(self, cause: Cause) -> Iterator[None]:
        """What is done within the ``with`` is no part of a step."""
        start = self._clock()
        try:
            yield
        finally:
            self._spent[cause] += self._clock() - start

    def totals(self) -> pb.WorkerTimes:
        """All time so far, by what it went to."""
        seconds = dict(self._spent)
        for part, cause in _CAUSES.items():
            seconds[cause] += self._sums[_PLACE[part]]
        # Two clocks: a shard's update cannot have taken longer than the exchange that it was in.
        apply_s = min(self._apply_s, seconds["network"])
        seconds["network"] -= apply_s
        return pb.WorkerTimes(**seconds, apply=apply_s)

    def end(self) -> None:
        """The step counts."""
        # Without the commit, which waits for others.
        step_s = sum(self._rows[self._at + 1 : self._at + _WIDTH - 1])
        self._lately[self._steps % MEDIAN_STEPS] = step_s
        self._steps += 1

    @property
    def steps(self) -> int:
        """How many have come to their end. Any thread may ask."""
        return self._steps

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
