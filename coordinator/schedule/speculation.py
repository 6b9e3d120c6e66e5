"""Workers that are slow with a micro-batch: their speed, second attempts, late rounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.schedule.micro_batch import Held, MicroBatch, Tally
from coordinator.schedule.pace import Speeds
from psrpc.core.policy import Policy

OVERDUE = 2
"""A second attempt is due once the first has taken this many times the duration that the idle
worker would need, but not before its own worker should have finished."""


class Speculation:
    """Finds attempts that would end later than a second attempt that an idle worker begins now. The
    remaining time decides, not the elapsed time (Zaharia et al. 2008, "Improving MapReduce
    Performance in Heterogeneous Environments"). So an attempt that is about to end is left alone,
    and one of a worker known to be slow is doubled as soon as a worker is idle."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def second(
        self, micros: Iterable[MicroBatch], worker: str, now: float
    ) -> tuple[MicroBatch, float] | None:
        """Returns the micro-batch that the idle ``worker`` should attempt as well, and the earliest
        time to do so. None if there is none, or nothing was measured yet."""
        candidates = []
        for micro in micros:
            times = self._times(micro, worker, now) if micro.may_be_doubled else None
            if times is not None:
                due, end = times
                # Of several that are due, the one that would end last.
                candidates.append((max(due, now), -end, micro))
        if not candidates:
            return None
        due, _, late = min(candidates, key=lambda item: item[:2])
        return late, due

    def _times(self, micro: MicroBatch, worker: str, now: float) -> tuple[float, float] | None:
        """Returns from when on a second attempt pays, and when the first one should end."""
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
    """Counts rounds that exceed the deadline; has no other effect. Not thread-safe."""

    def __init__(self, deadline_s: float | None, tally: Tally) -> None:
        """``deadline_s`` is None if there is no deadline."""
        self._deadline_s = deadline_s
        self._tally = tally
        self._since: float | None = None
        self._counted = False

    def begin(self, now: float) -> None:
        """Starts the round's time with its first lease."""
        if self._since is None:
            self._since = now

    def restart(self) -> None:
        """Resets for the next round."""
        self._since, self._counted = None, False

    def look(self, now: float) -> None:
        """Counts the round, which is incomplete, once if it is late."""
        if not self._counted and self._late(now):
            self._counted = True
            self._tally.overdue += 1

    def stragglers(self, micros: Sequence[MicroBatch], now: float) -> list[str]:
        """Names the workers that hold micro-batches of a late round, the micro-batches, and for how
        long."""
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


class SlowAttempts:
    """Watches how long the attempts of a round take. Not thread-safe.

    Attributes:
        speeds: the speeds of the workers.
        deadline: the deadline of the open round.
    """

    def __init__(self, policy: Policy, tally: Tally) -> None:
        self.speeds = Speeds()
        self.deadline = Deadline(policy.round_deadline_s, tally)
        self._speculation = Speculation(self.speeds) if policy.speculate else None
        self._left: dict[str, tuple[Held, int]] = {}
        """By worker: its attempt that a decided round did not name, and the attempt's number of
        records."""

    def second(
        self, micros: Iterable[MicroBatch], worker: str, now: float
    ) -> tuple[MicroBatch, float] | None:
        """See :meth:`Speculation.second`; None without ``speculate``."""
        if self._speculation is None:
            return None
        return self._speculation.second(micros, worker, now)

    def left(self, micro: MicroBatch) -> None:
        """Remembers the attempts of ``micro`` that its decided round does not name."""
        for number, held in micro.attempts.items():
            if micro.committed is not None and number != micro.committed.attempt:
                self._left[held.worker] = held, micro.batch.count

    def asks(self, worker: str, now: float) -> None:
        """Measures the attempt of a decided round that ``worker`` gives up by asking for work."""
        left = self._left.pop(worker, None)
        if left is not None:
            held, records = left
            self.speeds.measure_unfinished(worker, records, now - held.since)

    def forget(self, worker: str) -> None:
        """Forgets a departed ``worker``."""
        self.speeds.forget(worker)
        self._left.pop(worker, None)
