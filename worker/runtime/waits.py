"""What a worker waits for, said aloud and told to the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from psrpc.ops.retry import Announcer

Reason = str | Callable[[], str]


class Waits:
    """``with waits.on("shard 1"):`` around whatever may take long.

    One thread waits; any other may call :meth:`reason` and :meth:`tick`, which is what makes the
    words come out although the waiting thread is blocked. Entering and leaving is two assignments,
    so it may be used on every step.
    """

    def __init__(self, say: Callable[[str, float], object]) -> None:
        """``say(reason, waited_s)`` writes a line."""
        self._announcer = Announcer(say)
        self._reason: Reason | None = None
        self._count = 0
        self._ticked = 0

    def on(self, reason: Reason) -> Waits:
        """What is awaited; a function is asked when somebody wants to know. Within the ``with`` it
        may be called again to change the words of the same wait."""
        self._reason = reason
        return self

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reason = None

    def reason(self) -> str:
        """What is awaited now, in words; empty when nothing is."""
        reason = self._reason
        return reason if isinstance(reason, str) else reason() if reason is not None else ""

    def tick(self, now: float) -> None:
        """Announces a wait that has lasted; call it about once a second, from one thread."""
        reason, count = self.reason(), self._count
        if not reason or count != self._ticked:
            # A wait that ended and began anew between two ticks is not one long wait.
            self._announcer.over()
        if reason:
            self._announcer.waiting(reason, now)
        self._ticked = count
