"""Threads, what they wait for, and the clock and the chance that they go by."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

_RANDOM = random.Random()
"""Our own: a job seeds Python's in every process alike, and layers draw from that one."""


class Threads:
    """Those of this process. What waits takes them from here, so that the simulator can put others
    in their place, which take turns."""

    def thread(self, target: Callable[[], object], name: str) -> threading.Thread:
        """A thread that ends with the process, not started yet."""
        return threading.Thread(target=target, name=name, daemon=True)

    def pool(self, workers: int, name: str) -> Executor:
        """At most so many threads, made when there is work for them."""
        return ThreadPoolExecutor(workers, name)

    def event(self) -> threading.Event:
        """A flag, down at first."""
        return threading.Event()

    def condition(self) -> threading.Condition:
        """A lock of its own, and threads that wait for what it guards."""
        return threading.Condition()

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return time.monotonic()

    def chance(self) -> float:
        """A number drawn from [0, 1)."""
        return _RANDOM.random()


THREADS = Threads()
