"""The workers that train: which take part in rounds, and which share of a round each gets. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

SLACK = 1.1
"""How many times as long as the shortest possible a round may take, so that workers of nearly the
same speed take turns."""

AGAIN_AFTER = 50
"""A worker that is too slow for a part of any round gets a micro-batch after rounds of this many
times the time that it takes for one, since it may have become faster."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker among which rounds are divided. ``speed`` is that of one of its ``devices``, in
    micro-batches per unit of time."""

    name: str
    speed: float
    devices: int = 1

    def takes(self, micros: int) -> float:
        """Returns how long it computes ``micros`` micro-batches, one on each device at a time."""
        return math.ceil(micros / self.devices) / self.speed

    def can_do(self, length: float) -> int:
        """Returns how many micro-batches it computes in that time."""
        return self.devices * math.floor(length * self.speed)


def shortest_round(micros: int, members: Sequence[Member]) -> float:
    """Returns how long a round of ``micros`` micro-batches takes that is divided best."""
    ends = [(one.takes(1), at, 1) for at, one in enumerate(members)]
    heapq.heapify(ends)
    length = 0.0
    for _ in range(micros):
        length, at, count = ends[0]
        heapq.heapreplace(ends, (members[at].takes(count + 1), at, count + 1))
    return length


class RoundDivision:
    """Divides rounds among workers so that each round is over early. Not thread-safe.

    A round is as long as its slowest worker takes. Shares in proportion to speed would now and then
    give a worker one micro-batch more than it computes while the others do theirs, and all would
    wait for it. So a worker gets at most what fits into little more than the shortest possible
    round; within that, its share of many rounds is its share of the total speed.
    """

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        """When each worker's next micro-batch is due, in a virtual time: the faster a worker, the
        less of it a micro-batch takes."""
        self._left_out: dict[str, float] = {}
        """By worker that is too slow for a part: the length of all rounds since it had one."""

    def divide(self, micros: int, members: Sequence[Member]) -> list[str]:
        """Returns the worker of each micro-batch of a round. Of equal workers the first of
        ``members`` comes first."""
        length = shortest_round(micros, members)
        began = min((self._due[m.name] for m in members if m.name in self._due), default=0.0)
        due = [(self._due.get(one.name, began), at) for at, one in enumerate(members)]
        room = [one.can_do(length * SLACK) for one in members]
        divided: list[str] = []

        def give(at: int, when: float) -> None:
            one = members[at]
            divided.append(one.name)
            due[at] = (when + 1 / (one.speed * one.devices), at)
            room[at] -= 1

        if (again := self._to_try(length, members, room)) is not None:
            give(again, due[again][0])
        queue = [one for one in due if room[one[1]] > 0]
        heapq.heapify(queue)
        while len(divided) < micros:
            when, at = heapq.heappop(queue)
            give(at, when)
            if room[at] > 0:
                heapq.heappush(queue, due[at])
        # A worker that got less than its share makes up for one micro-batch at most.
        least = max(due)[0] - max(1 / (one.speed * one.devices) for one in members)
        self._due = {members[at].name: max(when, least) for when, at in due}
        return divided

    def _to_try(self, length: float, members: Sequence[Member], room: Sequence[int]) -> int | None:
        """Returns the place of a worker that is too slow for a part and gets one nevertheless."""
        self._left_out = {
            one.name: self._left_out.get(one.name, 0.0) + length
            for one, fits in zip(members, room, strict=True)
            if not fits
        }
        for at, one in enumerate(members):
            if self._left_out.get(one.name, 0.0) >= AGAIN_AFTER * one.takes(1):
                del self._left_out[one.name]
                return at
        return None


class Crew:
    """The workers of a generation that train. Not thread-safe."""

    def __init__(self, needed: int) -> None:
        """``needed`` is the number of workers that suffice for a round."""
        self._needed = needed
        self._asked: dict[str, bool] = {}
        """By worker that has asked for work: whether it can compute rounds that are decided
        ahead."""
        self._devices: dict[str, int] = {}
        self._worked: set[str] = set()
        self._division = RoundDivision()

    @property
    def names(self) -> list[str]:
        """The workers among which rounds are divided, sorted. Empty while a worker cannot compute
        such rounds, or while fewer than needed have done a micro-batch: the first one may take
        long."""
        worked = self._asked.keys() & self._worked
        ready = len(worked) >= min(len(self._asked), self._needed)
        return sorted(worked) if ready and all(self._asked.values()) else []

    def devices(self, worker: str) -> int:
        """Returns how many micro-batches ``worker`` computes at once, one on each device."""
        return self._devices.get(worker, 1)

    def lanes(self, workers: int) -> int:
        """Returns how many micro-batches ``workers`` workers compute at once; one that has not
        asked yet counts as one with a single device."""
        return max(1, workers) + sum(count - 1 for count in self._devices.values())

    def divide(self, micros: int, weights: Mapping[str, float]) -> list[str]:
        """Returns the worker of each micro-batch of a round of ``micros``.

        Args:
            weights: the speeds of workers with all their devices, in any unit, where known; others
                count as the mean of them.
        """
        names = self.names
        known = {name: weights[name] / self.devices(name) for name in names if name in weights}
        usual = fmean(known.values()) if known else 1.0
        members = [Member(name, known.get(name, usual), self.devices(name)) for name in names]
        return self._division.divide(micros, members)

    def asks(self, worker: str, able: bool, devices: int = 1) -> None:
        """Notes that ``worker`` asks for work; ``able`` says whether it can compute rounds that are
        decided ahead, ``devices`` how many micro-batches it computes at once."""
        self._asked[worker] = able
        self._devices[worker] = max(1, devices)

    def worked(self, worker: str) -> None:
        """Notes that ``worker`` has done a micro-batch."""
        self._worked.add(worker)

    def left(self, worker: str) -> None:
        """Forgets a worker."""
        self._asked.pop(worker, None)
        self._devices.pop(worker, None)
        self._worked.discard(worker)
