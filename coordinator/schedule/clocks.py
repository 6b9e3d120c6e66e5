"""The clocks of workers in ssp mode: how far each may run ahead. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from psrpc.core.commands import AwaitedWorkers, WorkerClock


@dataclass(slots=True)
class _Clock:
    """The clock of a worker. ``holds`` means that others have waited for it since it ``entered``;
    ``counted`` means that the shards count its steps themselves."""

    steps: int
    entered: WorkerClock
    counted: bool
    holds: bool = True


class Clocks:
    """The steps that each worker has done. Not thread-safe.

    A worker that does something else, finds nothing to do, or is gone delays no other. When it
    enters or returns, its clock is raised to the least of the others, so that they do not wait for
    steps that it has missed. The least clock therefore never falls.

    Shards hold back a worker that supports clocks: they count its steps as these arrive, and learn
    from :attr:`awaited` which workers the others wait for. Other workers are held back by their
    leases, see :meth:`allowed`.
    """

    def __init__(self, staleness: int) -> None:
        """``staleness`` is s ≥ 0, in steps."""
        assert staleness >= 0
        self._staleness = staleness
        self._clocks: dict[str, _Clock] = {}
        self._floor = 0
        self._number = 0
        """Rises with every change that shards have to hear of."""

    @property
    def number(self) -> int:
        """Number of the last change of :attr:`awaited`; 0 before the first."""
        return self._number

    def entered(self, worker: str) -> WorkerClock | None:
        """Returns the clock that ``worker`` had when others began to wait for it; None if they do
        not."""
        clock = self._clocks.get(worker)
        return clock.entered if clock is not None and clock.holds else None

    @property
    def awaited(self) -> AwaitedWorkers:
        """The workers that others wait for now."""
        holding = [(n, c) for n, c in self._clocks.items() if c.holds]
        told = [WorkerClock(name, clock.entered.entry, clock.steps) for name, clock in holding]
        return AwaitedWorkers(self._number, tuple(told))

    @property
    def holding(self) -> dict[str, int]:
        """The clocks of the workers that others wait for."""
        return {name: clock.steps for name, clock in self._clocks.items() if clock.holds}

    @property
    def least(self) -> int:
        """The least clock of the workers that others wait for, or the last such value."""
        return min((c.steps for c in self._clocks.values() if c.holds), default=self._floor)

    def clock(self, worker: str) -> int | None:
        """Returns the steps of ``worker``, as others count them; None if unknown."""
        clock = self._clocks.get(worker)
        return None if clock is None else clock.steps

    def enter(self, worker: str, counted: bool = False, least: int = 0) -> WorkerClock:
        """Notes that ``worker`` trains; returns its clock as of when it began to.

        Args:
            counted: whether the shards count its steps.
            least: the least clock that the others probably have by now, since their reports come
                late.
        """
        clock = self._clocks.get(worker)
        if clock is not None and clock.holds:
            return clock.entered
        self._number += 1
        steps = max(self.least, least, clock.steps if clock is not None else 0)
        entered = WorkerClock(worker, self._number, steps)
        self._clocks[worker] = _Clock(steps, entered, counted)
        return entered

    def allowed(self, worker: str, outstanding: int = 0) -> int:
        """Returns how many steps ``worker``, which trains, may get besides ``outstanding`` ones. It
        may begin a step if it is then at most s steps ahead of the present least clock."""
        clock = self._clocks[worker]
        assert clock.holds
        ahead = clock.steps + outstanding - self.least
        return max(0, self._staleness + 1 - ahead)

    def tick(self, worker: str) -> None:
        """Notes that ``worker`` has done a step."""
        clock = self._clocks.get(worker)
        if clock is not None:
            clock.steps += 1
            # The shards may have begun to count after its first steps.
            self._number += clock.holds and not clock.counted

    def idle(self, worker: str) -> None:
        """Notes that ``worker`` does something else, or nothing; it keeps its clock."""
        clock = self._clocks.get(worker)
        if clock is not None and clock.holds:
            self._floor = self.least
            self._number += 1
            clock.holds = False

    def leave(self, worker: str) -> None:
        """Notes that ``worker`` is gone."""
        self.idle(worker)
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
