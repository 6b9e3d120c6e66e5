"""Who looks at a job, and who of them has seen the newest state of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

WATCHED_S = 5.0
"""Whoever has asked within this time is taken to look on."""

PAGE = "page"
"""All browsers that ask this process, as one viewer."""


class Audience:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds, since whenever."""
        self._clock = clock
        self._changed = threading.Condition()
        self._asked: dict[str, float] = {}
        self._waits: set[str] = set()

    def asked(self, viewer: str) -> None:
        """Somebody is shown the newest state."""
        with self._changed:
            self._asked = self._watching()
            self._asked[viewer] = self._clock()
            self._waits.discard(viewer)
            self._changed.notify_all()

    def changed(self) -> None:
        """There is a newer state, which nobody has seen yet."""
        with self._changed:
            self._waits = set(self._watching())

    def wait_until_seen(self, timeout_s: float) -> bool:
        """Waits until all who looked on have seen the newest state; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waits, timeout_s)

    def _watching(self) -> dict[str, float]:
        now = self._clock()
        return {who: at for who, at in self._asked.items() if now - at < WATCHED_S}
