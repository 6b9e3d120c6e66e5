"""Second attempts of micro-batches that somebody is slow with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.schedule.micro_batch import MicroBatch, Tally
from coordinator.schedule.pace import Speeds

OVERDUE = 2
"""An attempt that has taken so many times as long as the idle worker would need is stuck, whatever
was measured of who holds it."""


class Speculation:
    """Knows who would be done later than a worker that begins now: the time to the end decides,
    and not the time since the beginning (Zaharia et al. 2008, "Improving MapReduce Performance in
    Heterogeneous Environments"). So an attempt that is about to end is left alone, and one of a
    worker that is known to be slow is doubled as soon as somebody is idle."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def second(
        self, micros: Iterable[MicroBatch], worker: str, now: float
    ) -> tuple[MicroBatch, float] | None:
        """The micro-batch of which ``worker``, which has nothing else to do, should make a second
        attempt, and from when on. None if there is none, or nothing was measured yet."""
        found = []
        for micro in micros:
            times = self._times(micro, worker, now) if micro.may_be_doubled else None
            if times is not None:
                due, end = times
                # Of several that are due, the one that would end last.
                found.append((max(due, now), -end, micro))
        if not found:
            return None
        due, _, late = min(found, key=lambda item: item[:2])
        return late, due

    def _times(self, micro: MicroBatch, worker: str, now: float) -> tuple[float, float] | None:
        """From when on a second attempt is worth while, and when the first one should end."""
        held = micro.oldest
        records = micro.batch.count
        own_s = self._speeds.expected_s(worker, records)
        theirs_s = self._speeds.expected_s(held.worker, records)
        if own_s is None or theirs_s is None:
            return None
        end = held.since + theirs_s
        due = now if now + own_s < end else held.since + max(theirs_s, OVERDUE * own_s)
        return due, end


class Deadline:
    """The time of the open round. It changes nothing but a count. Not thread-safe."""

    def __init__(self, deadline_s: float | None, tally: Tally) -> None:
        """None: there is none."""
        self._deadline_s = deadline_s
        self._tally = tally
        self._since: float | None = None
        self._counted = False

    def begin(self, now: float) -> None:
        """A micro-batch of the round is in somebody's hands; the time runs since the first."""
        if self._since is None:
            self._since = now

    def restart(self) -> None:
        """Another round is open."""
        self._since, self._counted = None, False

    def look(self, now: float) -> None:
        """The round is not complete by now; counts it once if it is late."""
        if not self._counted and self._late(now):
            self._counted = True
            self._tally.overdue += 1

    def stragglers(self, micros: Sequence[MicroBatch], now: float) -> list[str]:
        """Who holds what of a late round, and for how long."""
        if not self._late(now):
            return []
        return [
            f"{held.worker} has had {micro.batch} for {now - held.since:.1f} s"
            for micro in micros
            if micro.awaited
            for held in micro.attempts.values()
        ]

    def _late(self, now: float) -> bool:
        if self._deadline_s is None or self._since is None:
            return False
        return now - self._since > self._deadline_s
