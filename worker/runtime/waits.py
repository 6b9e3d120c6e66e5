"""Tracks what a worker waits for, for its log and the coordinator."""

from __future__ import annotations

from collections.abc import Callable

from psrpc.ops.retry import Announcer

Reason = str | Callable[[], str]


class WorkerWaits:
    """``with waits.on("shard 1"):`` marks an operation that may take long.

    One thread waits; any other may call :meth:`reason` and :meth:`tick`, which log the wait while
    the waiting thread is blocked. Entering and leaving are two assignments, cheap enough for every
    step.
    """

    def __init__(self, say: Callable[[str, float], object]) -> None:
        """``say(reason, waited_s)`` writes a line."""
        self._announcer = Announcer(say)
        self._reason: Reason | None = None
        self._count = 0
        self._ticked = 0

    def on(self, reason: Reason) -> WorkerWaits:
        """Sets the reason of the wait; a function is called when the reason is needed. May be
        called again within the ``with`` to change the reason of the same wait."""
        self._reason = reason
        return self

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *exception: object) -> None:
        self._reason = None

    def reason(self) -> str:
        """Returns the reason of the current wait; empty if there is none."""
        reason = self._reason
        return reason if isinstance(reason, str) else reason() if reason is not None else ""

    def tick(self, now: float) -> None:
        """Announces a wait that has lasted; one thread calls it about once a second."""
        reason, count = self.reason(), self._count
        if not reason or count != self._ticked:
            # A new wait began since the last tick, even if its reason is the same.
            self._announcer.over()
        if reason:
            self._announcer.waiting(reason, now)
        self._ticked = count
