"""Decides when the next checkpoint is due: by steps, by time, and by the cost of checkpoints.

Pure: the clock is an argument.

With an interval in time, k = :data:`COST_FACTOR` and N = :data:`PAY_IN`: the next checkpoint is
ordered no sooner after the last one than k c, where c is the median duration of the last three
committed ones, and no sooner than an N-th of the debt is paid. Each committed checkpoint adds k
times its duration to the debt; each second pays one. So a slow checkpoint among fast ones delays
the next for only a fraction of k times its duration, and in the long run a checkpoint is still in
progress for at most 1 / k of the time. Let the i-th take d_i, the next one be ordered g_i after it,
and b_i be the debt with it:

    b_i = max(0, b_(i-1) - g_(i-1)) + k d_i,    g_i >= b_i / N.

The first gives k d_i <= g_(i-1) + b_i - b_(i-1), so in the time T until the n-th is ordered
k (d_1 + ... + d_n) <= T + b_n. Both give b_i <= (1 - 1/N) b_(i-1) + k d_i, so b_n <= N k d, where d
is the longest. Hence d_1 + ... + d_n <= T / k + N d: beyond 1 / k of the time a constant, however
long the job runs. No gap grows by more than b_i / N <= k d. Checkpoints ordered for another reason
(an epoch to keep, a process that leaves) are not delayed, but add to the debt, which is capped at
N k d so that the bound on gaps includes them.

A checkpoint that fails, or ends with its generation, counts as never ordered. After the n-th
failure in a row the next one is ordered no sooner than min(2^(n-1), k) times the duration of the
failed one, or :data:`PAUSE_S` if that is longer, so that there is a pause between failures.

Literature: where checkpoints cost d and failures come M apart on average, an interval of
τ = sqrt(2 d M) loses the least time (Young 1974; Daly 2006 adds terms that matter where d is close
to M). Then checkpoints cost d/τ of the time, and so does, on average, repeated work, τ/2M. The
factor k = τ/d is thus optimal for M = k² d / 2: 20 is, for one failure in 200 times the duration of
a checkpoint. 60 s is, for a checkpoint of half a second and one failure an hour.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median_low

from psrpc.checkpoint.checkpoint_every import SaveInterval
from psrpc.ops.clock import Clock

COST_FACTOR = 20.0
"""The factor k. Load-bearing: ``docs/guarantees.md`` says by it how much work a loss may cost."""

PAY_IN = 10.0
"""The divisor N: an N-th of the debt is paid before the next checkpoint. Load-bearing likewise."""

PAUSE_S = 3.0
"""Least duration of a failed checkpoint, for the pause after it."""

RECENT = 3
"""Number of checkpoints whose median duration is the cost of one. Load-bearing likewise."""


REPEAT_S = 1.0
"""Seconds before an order that failed is repeated; doubled each time."""

LONGEST_REPEAT_S = 60.0


def checkpoint_pause_s(failures: int) -> float:
    """Returns the seconds before a state that failed to be saved ``failures`` times is ordered
    again."""
    return min(REPEAT_S * 2.0 ** min(failures - 1, 9), LONGEST_REPEAT_S)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a checkpoint is due, and the reason."""

    due: bool
    reason: str


def judge(
    every: SaveInterval, *, passed: int | None, since_s: float | None, held: str = ""
) -> Verdict:
    """Judges whether a checkpoint is due.

    Args:
        passed: a multiple of the interval in steps, passed since the last order.
        since_s: seconds since the last order; None where nothing has been trained.
        held: why the cost of checkpoints forbids one now; empty where it does not.
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
    return Verdict(False, held) if held else Verdict(True, reason)


class Cadence:
    """Order times and durations of a job's checkpoints, over all generations. Not thread-safe."""

    def __init__(self, every: SaveInterval, clock: Clock) -> None:
        self.every = every
        self.took_s = 0.0
        """Duration of the checkpoint that was committed last."""
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=RECENT)
        """Durations of the last committed checkpoints."""
        self._longest_s = 0.0
        """Longest duration of any."""
        self._owed_s = 0.0
        self._owed_at = 0.0
        """The debt, and the time at which it had this value; since then it is being paid."""
        self._next_at = 0.0
        """Earliest time of the next order, by cost."""
        self._gap_s = 0.0
        """Least seconds between the last committed order and the next, by cost."""
        self._since: float | None = None
        """Time of the last order, or of the start of training."""
        self._before: float | None = None
        """The same, but without orders of checkpoints in progress."""
        self._under_way: dict[str, float] = {}
        """Order times of checkpoints in progress."""
        self._failures = 0
        self._pause_until = 0.0
        """Failures in a row, and the end of the pause after them."""
        self._passed: int | None = None
        self._remarked = False

    @property
    def cost_s(self) -> float:
        """The duration of a checkpoint; 0 before the first is committed."""
        return median_low(self._recent) if self._recent else 0.0

    def interval_s(self, steps_per_s: float) -> float | None:
        """Returns the longest time from one periodic order to the next while nothing fails; None
        for an interval in steps while no steps are done."""
        if self.every.seconds is not None:
            return max(self.every.seconds, self._gap_s)
        assert self.every.steps is not None
        return self.every.steps / steps_per_s if steps_per_s > 0 else None

    def stepped(self, before: int, after: int) -> None:
        """Notes that the global step went from ``before`` to ``after``."""
        if self._since is None and after > before:
            self._since = self._clock.now()
        steps = self.every.steps
        if steps is not None and before // steps < after // steps:
            self._passed = after // steps * steps

    @property
    def verdict(self) -> Verdict:
        """Whether a checkpoint is due now."""
        now = self._clock.now()
        since_s = None if self._since is None else now - self._since
        return judge(self.every, passed=self._passed, since_s=since_s, held=self._held(now))

    def ordered(self, name: str) -> None:
        """Notes that a checkpoint was ordered, for whatever reason."""
        if not self._under_way:
            self._before = self._since
        self._since = self._under_way[name] = self._clock.now()
        self._passed = None

    def committed(self, name: str) -> None:
        """Notes that the checkpoint is on disk."""
        at = self._under_way.pop(name, None)
        if at is None:
            return
        self._before = at if self._before is None else max(self._before, at)
        self.took_s = took_s = self._clock.now() - at
        self._recent.append(took_s)
        self._longest_s = max(self._longest_s, took_s)
        # Two checkpoints in progress may end in the other order.
        paid_s = max(0.0, at - self._owed_at)
        owed_s = max(0.0, self._owed_s - paid_s) + COST_FACTOR * took_s
        self._owed_s = min(owed_s, PAY_IN * COST_FACTOR * self._longest_s)
        self._owed_at = max(self._owed_at, at)
        self._gap_s = max(COST_FACTOR * self.cost_s, self._owed_s / PAY_IN)
        self._next_at = at + self._gap_s
        self._failures, self._pause_until = 0, 0.0

    def failed(self, name: str) -> None:
        """Notes that the checkpoint failed for good."""
        now = self._clock.now()
        at = self._under_way.get(name)
        if at is None:
            return
        self.withdrawn(name)
        pause_s = min(2.0 ** min(self._failures, 10), COST_FACTOR) * max(now - at, PAUSE_S)
        self._failures += 1
        self._pause_until = now + pause_s

    def withdrawn(self, name: str) -> None:
        """Undoes the order."""
        if self._under_way.pop(name, None) is not None:
            self._since = max(self._under_way.values(), default=self._before)

    def take_remarks(self) -> list[str]:
        """Returns, once, a warning that the requested interval cannot be kept."""
        least_s, asked_s = COST_FACTOR * self.cost_s, self.every.seconds
        if self._remarked or self.every.steps is not None or asked_s is None or least_s <= asked_s:
            return []
        self._remarked = True
        return [
            f"checkpoint_every is {self.every}, but checkpoints take {self.cost_s:.1f} s: the next "
            f"one comes {least_s:.0f} s after the last, so that they take at most "
            f"{1 / COST_FACTOR:.0%} of the time"
        ]

    def given_up(self) -> None:
        """Withdraws the checkpoints in progress at the end of a generation."""
        for name in list(self._under_way):
            self.withdrawn(name)
        self._passed = None

    def _held(self, now: float) -> str:
        """Says why no periodic checkpoint may be ordered now; empty where one may."""
        if self._under_way:
            return "one is under way"
        if now < self._next_at:
            return (
                f"checkpoints take {self.cost_s:.1f} s, the last one took {self.took_s:.1f} s: "
                f"{self._next_at - now:.0f} s more"
            )
        if now < self._pause_until:
            return f"{self._failures} failed in a row: {self._pause_until - now:.0f} s more"
        return ""


class FinalState:
    """The state that training ends with, in one generation. It does not change any more, so one
    that could not be saved is ordered again under another name, after a pause. Not thread-safe."""

    def __init__(self) -> None:
        self.known = False
        """True if it was evaluated already, as the state of an epoch."""
        self.saved = False
        """True once it is on disk (and kept, if it is evaluated)."""
        self.name: str | None = None
        """Name of its snapshot, once that is ordered; None again if it fails."""
        self._refused = ""
        """Why it could not be saved, until it is ordered again."""
        self._tries = 0
        """Failed orders."""
        self._again_at: float | None = None

    @property
    def due(self) -> bool:
        """True if its snapshot may be ordered once training is done."""
        return self.name is None and not self._refused

    def order(self, name: str) -> str:
        """Notes that it is ordered now as ``name``; returns that name, distinct from those of
        failed orders."""
        self.name = f"{name}.r{self._tries}" if self._tries else name
        return self.name

    def taken(self, name: str) -> None:
        """Notes that every shard has the snapshot ``name``, perhaps one of another state."""
        self.saved = self.saved or name == self.name

    def withdrawn(self, name: str) -> None:
        """Undoes the order ``name``, which may be of another snapshot."""
        if name == self.name:
            self.name, self.saved = None, False

    def failed(self, reason: str) -> str:
        """Notes that its snapshot failed; returns a warning the first time, else nothing."""
        name, self.name, self.saved, self._refused = self.name, None, False, reason
        self._tries += 1
        if self._tries > 1:
            return ""
        return (
            f"the final state cannot be saved as {name}: {reason}; the shards "
            "keep it, and it is tried again until it is saved"
        )

    def retry(self, now: float) -> None:
        """Lets a state that could not be saved be ordered again, after a pause. Call it
        periodically."""
        if not self._refused:
            return
        if self._again_at is None:
            self._again_at = now + checkpoint_pause_s(self._tries)
        elif now >= self._again_at:
            self._refused, self._again_at = "", None

    def waiting_for(self) -> str:
        """Says why it is not saved; empty while nothing is wrong with it."""
        if not self._refused:
            return ""
        return (
            f"the final state to be saved: {self._refused}; tried again after "
            f"{checkpoint_pause_s(self._tries):.0f} s"
        )
