"""The checkpoint interval of a job: steps, time, or whichever comes first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from psrpc.core.text import counted

CheckpointEvery: TypeAlias = int | str | None
"""The value in a job: steps (500), time ("60s", "2m", "1.5h"), or None for the default."""

DEFAULT_STEPS = 1000

DEFAULT_S = 60.0

EXPECTED = 'steps (500) or time with its unit ("60s", "2m", "1h"), above 0'

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?([smh])")

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The interval between checkpoints: ``steps``, ``seconds``, or whichever comes first. Only if
    ``seconds`` is set does the coordinator limit the cost of checkpoints."""

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        steps = [counted(self.steps, "step")] if self.steps is not None else []
        seconds = [f"{self.seconds:g} s"] if self.seconds is not None else []
        return " or ".join(steps + seconds)


def read_checkpoint_every(value: object) -> SaveInterval:
    """Parses a job's ``checkpoint_every``. Raises ValueError."""
    if value is None:
        return SaveInterval(DEFAULT_STEPS, DEFAULT_S)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return SaveInterval(steps=value)
    time = _TIME.fullmatch(value) if isinstance(value, str) else None
    if time is None or not (seconds := float(time[1]) * _UNITS_S[time[2]]):
        raise ValueError(f"{value!r}; expected {EXPECTED}")
    return SaveInterval(seconds=seconds)
