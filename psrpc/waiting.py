"""Says what is awaited, at a calm pace: nothing in a cluster hangs without a word."""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 3.0
"""Seconds between two announcements of one wait."""


class Announcer:
    """Decides when a wait is worth a line. Pure: the time comes in. Not thread-safe."""

    def __init__(self, say: Callable[[str, float], object], every_s: float = FIRST_S) -> None:
        """``say(reason, waited_s)`` writes the line."""
        self._say = say
        self._every_s = every_s
        self._since: float | None = None
        self._next = 0.0

    def waiting(self, reason: str, now: float) -> None:
        """Call it as often as you like while the wait lasts."""
        if self._since is None:
            self._since = now
            self._next = now + self._every_s
        if now >= self._next:
            self._say(reason, now - self._since)
            self._next = now + self._every_s

    def over(self) -> None:
        """The wait has ended; the next one starts afresh."""
        self._since = None

    def waited_s(self, now: float) -> float:
        """Seconds since the wait began; 0 when nothing is awaited."""
        return 0.0 if self._since is None else now - self._since
