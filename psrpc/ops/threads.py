"""Makes threads, locks and random numbers, and reads the clock, in one place that the simulator can
replace."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

_RANDOM = random.Random()
"""A generator of its own, because a job seeds Python's global one, for its layers, alike in every
process."""

os.register_at_fork(after_in_child=_RANDOM.seed)


class Threads:
    """Makes threads and locks. The simulator replaces this object by one whose threads take
    turns."""

    def thread(self, target: Callable[[], object], name: str) -> threading.Thread:
        """Makes a daemon thread, not started yet."""
        return threading.Thread(target=target, name=name, daemon=True)

    def pool(self, workers: int, name: str) -> Executor:
        """Makes a pool of up to ``workers`` threads, created on demand."""
        return ThreadPoolExecutor(workers, name)

    def event(self) -> threading.Event:
        """Makes an unset event."""
        return threading.Event()

    def condition(self) -> threading.Condition:
        """Makes a condition variable with its own lock."""
        return threading.Condition()

    def now(self) -> float:
        """Returns seconds since some fixed moment; never goes back."""
        return time.monotonic()

    def chance(self) -> float:
        """Draws a number from [0, 1)."""
        return _RANDOM.random()


THREADS = Threads()
