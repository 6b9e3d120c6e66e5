"""Threads, what they wait for, and the clock and the chance that they go by."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import pairwise

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
BLOCK = 1 << 17
"""Elements for one call of NumPy in a lane. Of shorter calls most of the time goes into handing
over the interpreter's lock: updates of 65,536 rows of 64 in calls of 2^15 elements took 9.3 ms in
four lanes, 5.7 in two and 4.5 in one; of 2^17 elements 4.4, 4.1 and 4.4."""

WORTH_BYTES = 1 << 20
"""Of rows: for less, waking a thread takes as long as the work."""


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


LANES = min(2, _CORES)
"""Threads that share a piece of work; more would wait for each other."""


_pool = ThreadPoolExecutor(max(1, LANES - 1), "rows")


def in_lanes(rows: int, row_nbytes: int, work: Callable[[int, slice], None]) -> None:
    """Calls ``work`` for parts of ``range(rows)`` that make up the whole, side by side, each with
    the number of its lane, less than :data:`LANES`; few rows are one part.

    Worth it where ``work`` is NumPy's, which lets other threads run, in calls that take long. What
    is written must not depend on where the parts are cut. The caller's thread takes a part itself.

    Raises:
        Exception: what ``work`` raised; no part is under way any more.
    """
    lanes = LANES if rows * row_nbytes >= WORTH_BYTES else 1
    cuts = [rows * lane // lanes for lane in range(lanes + 1)]
    parts = [slice(start, stop) for start, stop in pairwise(cuts)]
    others = [_pool.submit(_do, [(work, lane, parts[lane])]) for lane in range(1, lanes)]
    try:
        work(0, parts[0])
    finally:
        errors = [other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error


def _do(task: list[tuple[Callable[[int, slice], None], int, slice]]) -> None:
    # The pool knows the list for a moment longer than anybody waits; it must not know the arrays,
    # since a column of which a view lives cannot grow in place.
    work, lane, part = task.pop()
    work(lane, part)
