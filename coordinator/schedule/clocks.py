"""The clocks of workers in ssp mode: how far each may run ahead. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Clock:
    """The clock of a worker; ``holds`` means that others wait for it."""

    steps: int
    holds: bool = True


class Clocks:
    """The steps that each worker has done. Not thread-safe.

    A worker that does something else, finds nothing to do, or is gone delays no other. It enters or
    returns at its own clock or the least of the others, whichever is greater: they do not wait for
    what it has missed. So the least clock never falls.
    """

    def __init__(self, staleness: int) -> None:
        """``staleness`` is s ≥ 0, in steps."""
        assert staleness >= 0
        self._staleness = staleness
        self._clocks: dict[str, _Clock] = {}
        self._floor = 0

    @property
    def least(self) -> int:
        """The least clock of the workers that others wait for, or the last such value."""
        return min((c.steps for c in self._clocks.values() if c.holds), default=self._floor)

    def clock(self, worker: str) -> int | None:
        """Returns the steps of ``worker``, as others count them; None if unknown."""
        clock = self._clocks.get(worker)
        return None if clock is None else clock.steps

    def enter(self, worker: str) -> None:
        """Notes that ``worker`` trains."""
        clock = self._clocks.get(worker)
        if clock is not None and clock.holds:
            return
        self._clocks[worker] = _Clock(max(self.least, clock.steps if clock is not None else 0))

    def allowed(self, worker: str, outstanding: int = 0) -> int:
        """Returns how many more steps ``worker``, which trains, may get besides ``outstanding``
        ones: those at whose start it is at most s ahead of the present least clock."""
        clock = self._clocks[worker]
        assert clock.holds
        ahead = clock.steps + outstanding - self.least
        return max(0, self._staleness + 1 - ahead)

    def tick(self, worker: str) -> None:
        """Notes that ``worker`` has done a step."""
        if worker in self._clocks:
            self._clocks[worker].steps += 1

    def idle(self, worker: str) -> None:
        """Notes that ``worker`` does something else, or nothing; it keeps its clock."""
        if worker in self._clocks:
            self._floor = self.least
            self._clocks[worker].holds = False

    def leave(self, worker: str) -> None:
        """Notes that ``worker`` is gone."""
        self._floor = self.least
        self._clocks.pop(worker, None)

    def reason(self, worker: str) -> str:
        """Says why ``worker`` has to wait, and names the workers that it waits for."""
        least = self.least
        slowest = sorted(n for n, c in self._clocks.items() if c.holds and c.steps == least)
        names = ", ".join(slowest[:3]) + (" and others" if len(slowest) > 3 else "")
        clock = self._clocks.get(worker)
        mine = clock.steps if clock is not None else least
        return (
            f"{names} to catch up: {worker} has done {mine - least} "
            f"step{'' if mine - least == 1 else 's'} more and may be {self._staleness} ahead"
        )
