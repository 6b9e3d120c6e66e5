"""Wakes parked calls when there is news."""

from __future__ import annotations

import asyncio


class Bell:
    """Many wait, one rings, all look again. Used from one event loop."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None

    def ring(self) -> None:
        """Wakes everyone who waits now."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, deadline: float) -> bool:
        """Waits for a ring until ``deadline`` (in the loop's time); whether there was one."""
        if self._event is None:
            self._event = asyncio.Event()
        try:
            async with asyncio.timeout_at(deadline):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
