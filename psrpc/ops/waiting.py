"""Says what is awaited, at a calm pace: nothing in a cluster hangs without a word."""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 3.0
"""Seconds before a wait is announced."""

LONGEST_S = 60.0
"""Seconds between two announcements of one wait, at most."""

BUILDING, COMPILING = "building", "compiling"
"""First words of what a worker is busy with, where it waits for nobody else."""


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
