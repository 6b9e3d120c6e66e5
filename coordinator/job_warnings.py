"""The warnings of a job: what a person should know and need not act upon. Bounded."""

from __future__ import annotations

from typing import Protocol

from psrpc.logs import get_logger

log = get_logger()

KEPT = 50
"""The newest are."""


class Noticing(Protocol):
    """A part of the job that logs nothing itself: what it has noticed is taken out."""

    warnings: list[str]


class JobWarnings:
    """Logs each warning and keeps it; one that is kept already is not said again. Not
    thread-safe."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        """In the order in which they came. Replaced by each that comes, so it may be read on."""

    def add(self, *warnings: str) -> None:
        """There is something to know."""
        for warning in warnings:
            if warning not in self.kept:
                log.warning(warning)
                self.kept = [*self.kept, warning][-KEPT:]

    def take(self, part: Noticing) -> None:
        """What ``part`` has noticed since the last call."""
        noticed, part.warnings = part.warnings, []
        self.add(*noticed)
