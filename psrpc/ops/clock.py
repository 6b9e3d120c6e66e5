"""Clocks for the engines: monotonic seconds, never the wall clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Returns the seconds since some fixed moment; never goes back."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """See :class:`Clock`."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """See :class:`Clock`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock ``seconds`` forward."""
        assert seconds >= 0
        self._now += seconds
