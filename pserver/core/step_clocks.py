"""Counts the steps of workers on one shard in ssp mode (Ho et al. 2013). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from psrpc.core.commands import AwaitedWorkers


@dataclass(slots=True)
class _Steps:
    """The number of steps of a worker that others wait for; ``entry`` numbers the coordinator's
    change that made others wait for it."""

    entry: int
    steps: int


class StepClocks:
    """Counts the steps of each worker that others wait for. Not thread-safe: the engine holds the
    shard's lock.

    A worker enters with its first pull, or when the coordinator lists it. Others wait for it until
    the coordinator no longer lists it or revokes it.
    """

    def __init__(self, staleness: int | None) -> None:
        """``staleness`` is s, in steps; None if the policy is not ssp, and then nothing is
        counted."""
        self.begin(staleness)

    def begin(self, staleness: int | None) -> None:
        """Starts a generation, in which no worker has entered."""
        self._staleness = staleness
        self._number = 0
        self._clocks: dict[str, _Steps] = {}
        self._newest: dict[str, int] = {}
        """Worker -> number of the last attempt that was counted."""

    def enter(self, worker: str, entry: int, steps: int) -> None:
        """Makes others wait for ``worker`` from now on, unless a newer list of the coordinator has
        arrived since ``entry``."""
        if entry > self._number:
            self._enter(worker, entry, steps)

    def follow(self, told: AwaitedWorkers) -> bool:
        """Replaces the workers that others wait for by the coordinator's list; returns False if the
        list is not newer than the last one."""
        if told.number <= self._number:
            return False
        self._number = told.number
        entries = {clock.worker: clock.entry for clock in told.workers}
        for worker, clock in list(self._clocks.items()):
            # A larger entry was made after this list; keep it.
            if clock.entry <= told.number and entries.get(worker) != clock.entry:
                del self._clocks[worker]
        for one in told.workers:
            self._enter(one.worker, one.entry, one.steps)
        return True

    def step(self, worker: str, attempt: int) -> bool:
        """Counts a push, unless it is repeated. Returns whether it advanced the clock of a worker
        that others wait for."""
        if self._staleness is None or attempt <= self._newest.get(worker, 0):
            return False
        self._newest[worker] = attempt
        clock = self._clocks.get(worker)
        if clock is not None:
            clock.steps += 1
        return clock is not None

    def leave(self, worker: str) -> None:
        """Notes that ``worker`` is gone."""
        self._clocks.pop(worker, None)
        self._newest.pop(worker, None)

    def waits(self, worker: str) -> bool:
        """Whether ``worker`` is too far ahead for its next step."""
        clock = self._clocks.get(worker)
        if clock is None or self._staleness is None:
            return False
        return clock.steps - self._least > self._staleness

    def reason(self, worker: str) -> str:
        """Says which workers ``worker`` waits for."""
        if not self._clocks:
            return "the coordinator to say whom workers wait for"
        least = self._least
        slowest = sorted(n for n, c in self._clocks.items() if c.steps == least)
        names = ", ".join(slowest[:3]) + (" and others" if len(slowest) > 3 else "")
        return f"{names} to catch up with {worker}, which may be {self._staleness} steps ahead"

    @property
    def _least(self) -> int:
        return min(clock.steps for clock in self._clocks.values())

    def _enter(self, worker: str, entry: int, steps: int) -> None:
        if self._staleness is None:
            return
        clock = self._clocks.get(worker)
        if clock is None:
            self._clocks[worker] = _Steps(entry, steps)
            return
        clock.entry, clock.steps = max(clock.entry, entry), max(clock.steps, steps)
