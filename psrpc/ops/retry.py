"""Trying again: how often, how long, and when not to."""

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
"""Seconds before a wait is announced."""

LONGEST_S = 60.0
"""Seconds between two announcements of one wait, at most."""

BUILDING, COMPILING = "building", "compiling"
"""First words of what a worker is busy with, where it waits for nobody else."""


Result = TypeVar("Result")


@dataclass(frozen=True)
class RetryPolicy:
    """Pauses grow from ``first_s`` to ``longest_s``, each cut by a random part of its half.

    ``budget_s`` bounds the whole, first try included.
    """

    first_s: float = 0.05
    longest_s: float = 2.0
    budget_s: float = 60.0

    def pause_s(self, failures: int, chance: float) -> float:
        """The pause after ``failures`` tries failed; ``chance`` is drawn from [0, 1)."""
        whole = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return whole * (1 - chance / 2)


@dataclass(frozen=True)
class GaveUp:
    """Tries have come to an end.

    Attributes:
        last: what the last try came to.
        tries: how many there were.
        spent_s: from the first try on.
        sent: whether one of them may have reached its peer without an answer, and taken effect.
    """

    last: PsError
    tries: int
    spent_s: float
    sent: bool

    def __str__(self) -> str:
        return f"{self.tries} tries in {self.spent_s:.1f} s: {self.last}"


def persist(
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
    """Repeats an idempotent ``call`` while trying again may help. The call itself has a deadline,
    by which the whole may exceed the budget.

    Args:
        give_up: makes the error to raise when the budget is used up.
        stop: set from elsewhere, it ends the tries in the same way.
        announce: hears the reason after every try that failed.
        again: whether to try again after an error; never one that is not ``retryable``.
        alive: whether an error says that the peer is there and needs time, after which the budget
            counts anew.

    Raises:
        PsError: at once, what no repetition can mend (a bad argument, an old generation); or what
            ``give_up`` makes.
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
    """``"waiting for shard 1"``, or what somebody is busy with: ``"compiling 12 variables"``."""
    busy = reason.startswith((BUILDING, COMPILING))
    return reason if busy else f"waiting for {reason}"


class Announcer:
    """Decides when a wait is worth a line: at first after ``every_s``, then whenever it has lasted
    twice as long, and at least every :data:`LONGEST_S`; words that have changed after ``every_s``.
    Pure: the time comes in. Not thread-safe."""

    def __init__(self, say: Callable[[str, float], object], every_s: float = FIRST_S) -> None:
        """``say(reason, waited_s)`` writes the line."""
        self._say = say
        self._every_s = every_s
        self._since: float | None = None
        self._said_at = self._changed = 0.0
        self._said = ""

    def waiting(self, reason: str, now: float) -> None:
        """Call it as often as you like while the wait lasts."""
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
        """The wait has ended; the next one starts afresh."""
        self._since = None

    def waited_s(self, now: float) -> float:
        """Seconds since the wait began; 0 when nothing is awaited."""
        return 0.0 if self._since is None else now - self._since
