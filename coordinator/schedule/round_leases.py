"""Which micro-batch of the open round a worker gets. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from coordinator.schedule.crew import Crew
from coordinator.schedule.micro_batch import Held, MicroBatch, Tally
from coordinator.schedule.open_round import OpenRound
from coordinator.schedule.speculation import SlowAttempts
from psrpc.core.commands import Attempt
from psrpc.core.policy import Policy

NOT_SLOW = 0.8
"""Least speed, relative to the mean of all devices, at which a worker gets its next micro-batch in
advance: a slow worker would keep the others waiting for that."""


@dataclass(frozen=True, slots=True)
class RoundLease:
    """The attempt that a worker should make. If it is None, the worker asks again: at the time
    ``until``, or at any change if that is None. For ``ahead``, ``beside`` and
    ``last`` see :class:`coordinator.core.work.Round`, where the last is ``pull_next``.
    """

    attempt: Attempt | None
    ahead: Attempt | None = None
    last: bool = False
    until: float | None = None
    beside: tuple[Attempt, ...] = ()


class RoundLeases:
    """Chooses micro-batches, and numbers their attempts. Not thread-safe.

    Attributes:
        stuck: workers that cannot go on, whose micro-batches others may do as well.
    """

    def __init__(
        self,
        opened: OpenRound,
        slow: SlowAttempts,
        policy: Policy,
        tally: Tally,
        first: int,
        crew: Crew,
    ) -> None:
        """``first`` is the number of the first attempt; ``crew`` knows the workers' devices."""
        self._open = opened
        self._slow = slow
        self._policy = policy
        self._tally = tally
        self._next = first
        self._crew = crew
        self.stuck: Collection[str] = ()

    def lease(self, worker: str, now: float, number: int, workers: int) -> RoundLease:
        """Leases a micro-batch of round ``number``: the one ``worker`` holds, else an open one,
        else one that another worker is stuck or late with. ``workers`` is the number of active
        ones."""
        self._slow.asks(worker, now)
        held = self._open.held_by(worker)
        if held:
            return self._with_ahead(held[0], worker, now, number, workers)
        if self._open.has_open:
            micro = self._open.take(self._ratio(worker))
            attempt = self._attempt(micro, worker, now, number)
            return self._with_ahead(attempt, worker, now, number, workers)
        left = self._open.left_by(frozenset(self.stuck))
        if left is None:
            second = self._slow.second(self._open.micros, worker, now)
            if second is None:
                return RoundLease(None)
            left, due = second
            if now < due:
                return RoundLease(None, until=due)
        self._tally.speculative += 1
        attempt = self._attempt(left, worker, now, number)
        return self._with_ahead(attempt, worker, now, number, workers)

    def reserve(self, attempts: int) -> int:
        """Reserves the numbers of that many attempts, which another object leases; returns the
        first."""
        first, self._next = self._next, self._next + attempts
        return first

    def _with_ahead(
        self, attempt: Attempt, worker: str, now: float, number: int, workers: int
    ) -> RoundLease:
        ahead, beside = None, self._beside(attempt, worker, now, number, workers)
        if self._policy.backups:
            return RoundLease(attempt, beside=beside)
        if self._crew.devices(worker) == 1:
            ahead = self._ahead(attempt, worker, now, number, workers)
        # The other workers without a micro-batch take the open ones.
        idle = self._open.left <= workers - len(self._open.holders)
        return RoundLease(attempt, ahead, idle and ahead is None and not beside, beside=beside)

    def _beside(
        self, current: Attempt, worker: str, now: float, number: int, workers: int
    ) -> tuple[Attempt, ...]:
        """Returns the attempts that ``worker`` computes at the same time as ``current``, on its
        other devices: those that it holds, and its share of the open micro-batches."""
        devices, lanes = self._crew.devices(worker), self._crew.lanes(workers)
        held = [attempt for attempt in self._open.held_by(worker) if attempt != current]
        share = min(devices, -(-self._policy.open * devices // lanes))
        while len(held) + 1 < share and self._open.has_open:
            micro = self._open.take(self._ratio(worker))
            held.append(self._attempt(micro, worker, now, number))
        return tuple(held[: devices - 1])

    def _ahead(
        self, current: Attempt, worker: str, now: float, number: int, workers: int
    ) -> Attempt | None:
        """Returns the attempt of the round that ``worker`` computes after ``current``, leased now
        if it has none; None if others may finish sooner."""
        held = self._open.held_by(worker)
        for attempt in held:
            if attempt != current:
                return attempt
        ratio = self._ratio(worker)
        if self._policy.balance or self._policy.speculate or (ratio or 1) < NOT_SLOW:
            return None
        share = -(-self._open.uncommitted // self._crew.lanes(workers))
        if len(held) >= share or not self._open.has_open:
            return None
        return self._attempt(self._open.take(ratio), worker, now, number)

    def _ratio(self, worker: str) -> float | None:
        return self._slow.speeds.ratio(worker, self._crew.devices)

    def _attempt(self, micro: MicroBatch, worker: str, now: float, number: int) -> Attempt:
        """Returns a new attempt of ``micro`` by ``worker``."""
        attempt = Attempt(micro.batch, self._next)
        self._next += 1
        micro.attempts[attempt.number] = Held(worker, now, number)
        self._slow.deadline.begin(now)
        return attempt
