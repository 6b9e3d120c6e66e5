"""How long a running cluster takes to answer small calls, while it moves large tensors."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import PsError

INTERVAL_S = 0.02
KEPT = 100_000


@dataclass(frozen=True)
class Answers:
    """How long the calls of one kind took, in milliseconds; infinite where one failed."""

    count: int
    p99_ms: float
    max_ms: float


class Probe:
    """Makes one call again and again on a thread of its own, within a ``with`` block."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        """``call`` raises ``PsError`` where it fails."""
        self.name = name
        self._call = call
        self._made: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def made(self) -> list[tuple[float, float]]:
        """When each call began, and how long it took, in seconds."""
        return list(self._made)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            begin = time.monotonic()
            try:
                self._call()
            except PsError:
                self._made.append((begin, float("inf")))
            else:
                self._made.append((begin, time.monotonic() - begin))


def answers_during(
    made: Sequence[tuple[float, float]], windows: npt.NDArray[np.float64]
) -> Answers:
    """Those calls that were under way at any moment of ``windows``, ``[n, 2]`` seconds from-to."""
    if not made or not len(windows):
        return Answers(0, float("nan"), float("nan"))
    begin, took = np.array(made).T
    # A call that failed may have done so at once: take it for a short one here.
    end = begin + np.where(np.isinf(took), 0.0, took)
    met = ((begin[:, None] <= windows[:, 1]) & (end[:, None] >= windows[:, 0])).any(axis=1)
    found = took[met] * 1e3
    if not found.size:
        return Answers(0, float("nan"), float("nan"))
    p99 = float(np.percentile(found, 99, method="higher"))
    return Answers(len(found), p99, float(found.max()))
