"""Measures a worker's time: totals, and per step for ``worker run --step-times FILE``."""

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
"""The parts of a step, in column order. Async steps have ``push_pull``; sync steps have ``pull`` (0
if the parameters were there already), ``push`` and ``commit``. In ssp mode ``commit`` is the
wait for workers that are behind."""

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
"""Part -> the cause whose total its time is added to."""

MEDIAN_STEPS = 31
"""Number of recent steps whose median time the coordinator receives."""

_PLACE = {part: place for place, part in enumerate(PARTS, start=1)}
_WIDTH = len(COLUMNS)


class StepTimes:
    """Keeps the times of the last ``capacity`` steps in preallocated memory, and totals.

    The loop's thread calls ``begin``, then ``took`` after each part, then ``end``, which does
    nothing without a step; an unfinished step is not kept. Another thread may ``write`` meanwhile,
    or read ``totals``, which include the time between steps.
    """

    def __init__(
        self, capacity: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` returns seconds; monotonic clocks of processes on one host agree."""
        # One extra row for the step in progress.
        self._places = capacity + 1
        self._clock = clock
        self._rows = array("d", bytes(8 * _WIDTH * self._places))
        self._steps = 0
        self._begun = False
        self._at = 0
        self._last = 0.0
        # Sums over all steps by place in a row; then the time outside of steps by cause.
        self._sums = array("d", bytes(8 * _WIDTH))
        self._spent: dict[Cause, float] = dict.fromkeys(_CAUSES.values(), 0.0)
        self._apply_s = 0.0
        self._phase: pb.WorkerPosition.Phase = pb.WorkerPosition.PHASE_WAITING
        self._moves = 0
        # A ring of fixed size: a deque cannot be copied while another thread appends to it.
        self._lately = array("d", bytes(8 * MEDIAN_STEPS))

    def at(self, phase: pb.WorkerPosition.Phase) -> None:
        """Records the phase that the loop's thread enters."""
        self._phase = phase
        self._moves += 1

    def position(self) -> pb.WorkerPosition:
        """Returns the progress of the loop. Any thread may call it."""
        lately = self._lately[: self._steps]
        return pb.WorkerPosition(
            phase=self._phase, position=self._moves, median_step_s=median(lately) if lately else 0.0
        )

    def begin(self) -> None:
        """Begins a step."""
        self._begun = True
        self._at = at = self._steps % self._places * _WIDTH
        self._last = self._rows[at] = self._clock()
        for place in range(at + 1, at + _WIDTH):
            self._rows[place] = 0.0

    def took(self, part: Part) -> float:
        """Counts the time since the last call towards ``part``; returns it in seconds."""
        now = self._clock()
        seconds = now - self._last
        place = _PLACE[part]
        self._rows[self._at + place] += seconds
        self._sums[place] += seconds
        self._last = now
        return seconds

    def waited(self, seconds: float) -> None:
        """Counts the time since the last call, but at most ``seconds``, as a wait for other workers
        (the part ``commit``)."""
        waited_s = min(seconds, self._clock() - self._last)
        place = _PLACE["commit"]
        self._rows[self._at + place] += waited_s
        self._sums[place] += waited_s
        self._last += waited_s

    def applied(self, seconds: float) -> None:
        """Counts ``seconds`` of the last part as the shards' update."""
        self._apply_s += seconds

    @contextmanager
    def outside(self, cause: Cause) -> Iterator[None]:
        """Counts the time of the ``with`` block towards ``cause``, outside of any step."""
        start = self._clock()
        try:
            yield
        finally:
            self._spent[cause] += self._clock() - start

    def totals(self) -> pb.WorkerTimes:
        """Returns all time so far, by cause."""
        seconds = dict(self._spent)
        for part, cause in _CAUSES.items():
            seconds[cause] += self._sums[_PLACE[part]]
        # Two clocks measure this; an update cannot take longer than its exchange.
        apply_s = min(self._apply_s, seconds["network"])
        seconds["network"] -= apply_s
        return pb.WorkerTimes(**seconds, apply=apply_s)

    def end(self) -> None:
        """Ends the step and keeps it."""
        if not self._begun:
            return
        self._begun = False
        # Without the last column, the commit, which is a wait for other workers.
        step_s = sum(self._rows[self._at + 1 : self._at + _WIDTH - 1])
        self._lately[self._steps % MEDIAN_STEPS] = step_s
        self._steps += 1

    def drop(self) -> None:
        """Drops an unfinished step."""
        self._begun = False

    @property
    def steps(self) -> int:
        """The number of finished steps. Any thread may read it."""
        return self._steps

    def rows(self) -> list[tuple[float, ...]]:
        """Returns the kept steps, oldest first, each in the order of ``COLUMNS``."""
        steps = self._steps
        first = max(0, steps + 1 - self._places)
        starts = (step % self._places * _WIDTH for step in range(first, steps))
        return [tuple(self._rows[start : start + _WIDTH]) for start in starts]

    def write(self, path: Path) -> None:
        """Writes ``rows`` to a CSV file, in seconds. Raises OSError if that fails."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(",".join(COLUMNS) + "\n")
            for row in self.rows():
                file.write(",".join(f"{value:.6f}" for value in row) + "\n")
