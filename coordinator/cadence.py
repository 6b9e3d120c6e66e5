"""When the next checkpoint of a job is due, by its steps, by time, and by what checkpoints cost.

Pure: the clock comes in as an argument.

With an interval in time, the next checkpoint is ordered no sooner than :data:`COST_FACTOR` times
as long after the last one as that one took. So at most 1 / COST_FACTOR of the time goes by with a
checkpoint under way, whatever one takes: the i-th takes d_i, the next is ordered at least k d_i
after it, and the sum of all d_i is at most the sum of all gaps / k.

Of the literature: where checkpoints cost d and failures come M apart on average, the least time is
lost with τ = sqrt(2 d M) between them (Young 1974; Daly 2006 adds terms that matter where d is
close to M). Then checkpoints cost d/τ of the time, and so does, on average, work that is done
again, τ/2M. The factor k = τ/d is thus the best one for M = k² d / 2: 20 is, for one failure in 200
times what a checkpoint takes. 60 s is, for a checkpoint of half a second, for one an hour.
"""

from __future__ import annotations

from dataclasses import dataclass

from psrpc.checkpoint_every import SaveInterval
from psrpc.clock import Clock

COST_FACTOR = 20.0
"""Load-bearing: ``docs/guarantees.md`` says what a loss may cost by it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a checkpoint is due, and why, or why not yet."""

    due: bool
    reason: str


def judge(
    every: SaveInterval, *, passed: int | None, since_s: float | None, cost_s: float
) -> Verdict:
    """Whether a checkpoint is due.

    Args:
        passed: a multiple of the steps that was passed since the last checkpoint was ordered.
        since_s: seconds since then; None where nothing has been trained.
        cost_s: seconds that the last checkpoint took, from its order to its commit; infinite while
            it is under way.
    """
    if every.seconds is None:
        return Verdict(passed is not None, f"step {passed}" if passed else f"each {every}")
    if since_s is None:
        return Verdict(False, "nothing has been trained")
    if passed is not None:
        reason = f"step {passed}"
    elif since_s >= every.seconds:
        reason = f"{since_s:.0f} s since the last one"
    else:
        return Verdict(False, f"{since_s:.0f} s of {every}")
    if since_s < COST_FACTOR * cost_s:
        return Verdict(False, f"the last one took {cost_s:.1f} s: {COST_FACTOR * cost_s:.0f} s")
    return Verdict(True, reason)


class Cadence:
    """What checkpoints of a job were ordered when, and what they took; it outlives generations.
    Not thread-safe."""

    def __init__(self, every: SaveInterval, clock: Clock) -> None:
        self.every = every
        self.cost_s = 0.0
        """What the last checkpoint took."""
        self._clock = clock
        self._since: float | None = None
        """When the last checkpoint was ordered, or training began."""
        self._before: float | None = None
        """The same of the one before, while the last is under way."""
        self._under_way: str | None = None
        self._passed: int | None = None
        self._remarked = False

    def stepped(self, before: int, after: int) -> None:
        """The global step went from ``before`` to ``after``."""
        if self._since is None and after > before:
            self._since = self._clock.now()
        steps = self.every.steps
        if steps is not None and before // steps < after // steps:
            self._passed = after // steps * steps

    @property
    def verdict(self) -> Verdict:
        """Whether a checkpoint is due now."""
        under_way = self._under_way is not None
        return judge(
            self.every,
            passed=self._passed,
            since_s=None if self._since is None else self._clock.now() - self._since,
            cost_s=float("inf") if under_way else self.cost_s,
        )

    def ordered(self, name: str) -> None:
        """A checkpoint goes out, whatever the reason."""
        self._before, self._since = self._since, self._clock.now()
        self._under_way, self._passed = name, None

    def finished(self, name: str) -> None:
        """It is committed, or has failed."""
        if name == self._under_way and self._since is not None:
            self.cost_s = self._clock.now() - self._since
            self._under_way = None

    def take_remarks(self) -> list[str]:
        """Tells once that the interval that was asked for cannot be kept."""
        least_s, asked_s = COST_FACTOR * self.cost_s, self.every.seconds
        if self._remarked or self.every.steps is not None or asked_s is None or least_s <= asked_s:
            return []
        self._remarked = True
        return [
            f"checkpoint_every is {self.every}, but the last checkpoint took {self.cost_s:.1f} s: "
            f"the next one comes {least_s:.0f} s after it, so that they take at most "
            f"{1 / COST_FACTOR:.0%} of the time"
        ]

    def given_up(self) -> None:
        """The generation is over. One that was under way counts as if it was never ordered."""
        if self._under_way is not None:
            self._since, self._under_way = self._before, None
        self._passed = None
