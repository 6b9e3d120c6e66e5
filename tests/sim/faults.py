"""Which faults happen in a run, how often, and how often they did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

RATES: Mapping[str, tuple[float, float]] = {
    "request lost": (0.003, 0.1),
    "request lost in silence": (0.001, 0.02),
    "reply lost": (0.003, 0.1),
    "reply lost in silence": (0.001, 0.02),
    "delay": (0.003, 0.1),
    "duplicate": (0.01, 0.2),
    "echo": (0.1, 0.7),
    "stream broken": (0.02, 0.2),
    "stream half open": (0.01, 0.1),
    "commands meanwhile": (0.05, 0.5),
    "crash after the effect": (0.002, 0.03),
    "crash at the disk": (0.005, 0.05),
    "crash at the store": (0.002, 0.03),
    "store refuses": (0.002, 0.05),
    "EIO": (0.005, 0.1),
    "ENOSPC": (0.005, 0.1),
}
"""Kind -> least and greatest chance for each occasion, in a run that has this kind at all."""

SIGNALS = ("terminate all", "interrupt")
"""Those of :data:`PLANNED` that came last."""

CUT = "route cut"
"""What one process sends another is swallowed."""

PLANNED = (
    "crash",
    "crash of some",
    "crash of all",
    "power cut",
    "power cut of one",
    "terminate",
    "pause",
    "pause and crash",
    "pause and replacement",
    "rot",
    *SIGNALS,
    CUT,
)
"""Kinds that come at moments drawn beforehand."""


class Faults:
    """Draws them, and counts those that had an effect."""

    def __init__(
        self, random: Random, rates: Mapping[str, float], now: Callable[[], float]
    ) -> None:
        self._random = random
        self._rates = rates
        self._from_s = self._until_s = float("inf")
        self._now = now
        self.fired: Counter[str] = Counter()

    def begin(self, for_s: float) -> None:
        """Things go wrong from now on, for so long."""
        self._from_s = self._now()
        self._until_s = self._from_s + for_s

    @property
    def begun(self) -> bool:
        """Whether :meth:`begin` was called."""
        return self._from_s < float("inf")

    @property
    def over(self) -> bool:
        """Whether nothing goes wrong now."""
        return not self._from_s <= self._now() < self._until_s

    def strikes(self, kind: str) -> bool:
        """Whether a fault of this kind happens on this occasion."""
        rate = self._rates.get(kind)
        if rate is None or self.over or self._random.random() >= rate:
            return False
        self.fired[kind] += 1
        return True

    def between(self, least: float, greatest: float) -> float:
        """A time in seconds."""
        return self._random.uniform(least, greatest)
