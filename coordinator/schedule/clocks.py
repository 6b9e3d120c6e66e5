"""Clocks of stale synchronous parallel training: who may run ahead, and by how much.

Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
section 3: a worker at clock c may go on while

    c − min over workers of their clocks ≤ s,

so with s = 0 nobody starts step c + 1 before all have done step c.

Pure: no time, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Clock:
    """``holds``: whether others wait for it."""

    steps: int
    holds: bool = True


class Clocks:
    """The steps that each worker has done. Not thread-safe.

    A worker that does something else, finds nothing to do, or is gone holds nobody back. It comes
    back, or in, at its own clock or at the least that the others have come to, whichever is
    greater: they do not wait for what it has missed. So the least clock never falls.
    """

    def __init__(self, staleness: int) -> None:
        """``staleness`` is s ≥ 0, in steps."""
        assert staleness >= 0
        self._staleness = staleness
        self._clocks: dict[str, _Clock] = {}
        self._floor = 0

    @property
    def least(self) -> int:
        """The least clock of those that hold the others; if nobody does, the last there was."""
        return min((c.steps for c in self._clocks.values() if c.holds), default=self._floor)

    def clock(self, worker: str) -> int | None:
        """The steps that ``worker`` has done, as the others count them; None if unknown."""
        clock = self._clocks.get(worker)
        return None if clock is None else clock.steps

    def enter(self, worker: str) -> None:
        """``worker`` trains, now if it did not before."""
        clock = self._clocks.get(worker)
        if clock is not None and clock.holds:
            return
        self._clocks[worker] = _Clock(max(self.least, clock.steps if clock is not None else 0))

    def allowed(self, worker: str, outstanding: int = 0) -> int:
        """How many more steps ``worker``, which trains, may be given besides those that it has and
        has not done: those at whose start it is at most s ahead of the least clock now."""
        clock = self._clocks[worker]
        assert clock.holds
        ahead = clock.steps + outstanding - self.least
        return max(0, self._staleness + 1 - ahead)

    def tick(self, worker: str) -> None:
        """``worker`` has done a step that it was given."""
        if worker in self._clocks:
            self._clocks[worker].steps += 1

    def idle(self, worker: str) -> None:
        """``worker`` does something else, or has nothing to do; it keeps its clock."""
        if worker in self._clocks:
            self._floor = self.least
            self._clocks[worker].holds = False

    def leave(self, worker: str) -> None:
        """``worker`` is gone."""
        self._floor = self.least
        self._clocks.pop(worker, None)

    def reason(self, worker: str) -> str:
        """Why ``worker`` has to wait, in words that name whom it waits for."""
        least = self.least
        slowest = sorted(n for n, c in self._clocks.items() if c.holds and c.steps == least)
        names = ", ".join(slowest[:3]) + (" and others" if len(slowest) > 3 else "")
        clock = self._clocks.get(worker)
        mine = clock.steps if clock is not None else least
        return (
            f"{names} to catch up: {worker} has done {mine - least} "
            f"step{'' if mine - least == 1 else 's'} more and may be {self._staleness} ahead"
        )
