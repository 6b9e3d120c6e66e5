"""Retries calls, and decides when to log waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from psrpc.core.errors import PsError
from psrpc.ops.threads import THREADS

FIRST_S = 3.0
"""Seconds before the first announcement of a wait."""

LONGEST_S = 60.0
"""Maximum seconds between two announcements of one wait."""

BUILDING, COMPILING = "building", "compiling"
"""First words of reasons that describe a worker's own work, not a wait for another process."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class RetryPolicy:
    """The pauses between tries and the total time. Pauses double from ``first_s`` to ``longest_s``;
    each is shortened at random by up to a half.

    ``budget_s`` bounds the total time, including the first try.
    """

    first_s: float = 0.05
    longest_s: float = 2.0
    budget_s: float = 60.0

    def pause_s(self, failures: int, chance: float) -> float:
        """Returns the pause after ``failures`` failed tries; ``chance`` is drawn from [0, 1)."""
        whole = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return whole * (1 - chance / 2)


@dataclass(frozen=True)
class GaveUp:
    """The outcome of a call whose tries all failed.

    Attributes:
        last: the error of the last try.
        tries: the number of tries.
        spent_s: time since the first try.
        sent: whether an unanswered try may have reached the peer and taken effect.
    """

    last: PsError
    tries: int
    spent_s: float
    sent: bool

    def __str__(self) -> str:
        return f"{self.tries} tries in {self.spent_s:.1f} s: {self.last}"


def retry(
    call: Callable[[], Result],
    policy: RetryPolicy,
    give_up: Callable[[GaveUp], PsError],
    *,
    stop: threading.Event,
    announce: Callable[[str], object],
    again: Callable[[PsError], bool] = attrgetter("retryable"),
    alive: Callable[[PsError], bool] = lambda _error: False,
    now: Callable[[], float] = time.monotonic,
    chance: Callable[[], float] = THREADS.chance,
) -> Result:
    """Repeats an idempotent ``call`` while a retry may help. May exceed the budget by the deadline
    of one call.

    Args:
        give_up: makes the error to raise once the budget is spent.
        stop: when set, ends the tries in the same way.
        announce: receives the reason of every failed try.
        again: whether to retry after an error; false for all that are not ``retryable``.
        alive: whether an error proves that the peer is alive and needs time; restarts the budget.

    Raises:
        PsError: at once, an error that a retry cannot fix (a bad argument, an old generation); or
            the error that ``give_up`` makes.
    """
    began = now()
    failures = 0
    sent = False
    while True:
        try:
            return call()
        except PsError as error:
            if not again(error):
                raise
            failures += 1
            last = error
            sent = sent or error.sent
            if alive(error):
                began = now()
        pause = policy.pause_s(failures, chance())
        spent = now() - began
        if spent + pause > policy.budget_s or stop.is_set():
            raise give_up(GaveUp(last, failures, spent, sent))
        announce(str(last))
        stop.wait(pause)


def waiting_words(reason: str) -> str:
    """Formats ``"waiting for shard 1"``; keeps own work such as ``"compiling 12 variables"``."""
    busy = reason.startswith((BUILDING, COMPILING))
    return reason if busy else f"waiting for {reason}"


class Announcer:
    """Decides when to log a wait. Pure: callers pass the time. Not thread-safe.

    Logs a wait after ``every_s``, then whenever its duration has doubled, but at least every
    :data:`LONGEST_S`. Logs a changed reason after ``every_s``."""

    def __init__(self, say: Callable[[str, float], object], every_s: float = FIRST_S) -> None:
        """Calls ``say(reason, waited_s)`` for each log line."""
        self._say = say
        self._every_s = every_s
        self._since: float | None = None
        self._said_at = self._changed = 0.0
        self._said = ""

    def waiting(self, reason: str, now: float) -> None:
        """Records that the caller still waits for ``reason``, and logs that if it is time to. May
        be called as often as the caller likes."""
        if self._since is None:
            self._since = self._said_at = now
            self._said = ""
        if reason != self._said:
            pause_s = self._every_s
        else:
            pause_s = max(self._every_s, min(self._said_at - self._changed, LONGEST_S))
        if now - self._said_at >= pause_s:
            if reason != self._said:
                self._changed, self._said = self._said_at, reason
            self._said_at = now
            self._say(reason, now - self._since)

    def over(self) -> None:
        """Ends the wait."""
        self._since = None

    def waited_s(self, now: float) -> float:
        """Returns the seconds since the wait began; 0 without a wait."""
        return 0.0 if self._since is None else now - self._since
