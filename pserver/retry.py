"""Trying again: how often, how long, and when not to."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from psrpc.errors import NotReady, PsError, ShardUnreachable

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


def persist(
    call: Callable[[], Result],
    peer: str,
    policy: RetryPolicy,
    *,
    stop: threading.Event,
    announce: Callable[[str], object],
    now: Callable[[], float] = time.monotonic,
    chance: Callable[[], float] = random.random,
) -> Result:
    """Repeats an idempotent ``call`` while its errors say that trying again may help.

    Args:
        peer: who is called, for messages.
        stop: set from elsewhere, it ends the tries with the last error.
        announce: hears the reason after every try that failed.

    Raises:
        ShardUnreachable: the budget is used up and the shard did not answer.
        NotReady: the budget is used up and the shard still waits for what the message says.
        PsError: at once, what no repetition can mend (a bad argument, an old generation).
    """
    began = now()
    failures = 0
    while True:
        try:
            return call()
        except PsError as error:
            if not error.retryable:
                raise
            failures += 1
            last = error
        pause = policy.pause_s(failures, chance())
        spent = now() - began
        if spent + pause > policy.budget_s or stop.is_set():
            break
        announce(str(last))
        stop.wait(pause)
    if isinstance(last, NotReady):
        raise last
    raise ShardUnreachable(f"{peer} did not answer {failures} tries in {spent:.1f} s: {last}")
