"""How long a round may last before somebody is told who is late with it."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.schedule.micro_batch import MicroBatch
from coordinator.schedule.tally import Tally


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
