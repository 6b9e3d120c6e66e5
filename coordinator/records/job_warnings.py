"""The warnings of a job: what a person should know and need not act upon. Bounded."""

from __future__ import annotations

from typing import Protocol

from psrpc.ops.logs import get_logger

log = get_logger()

KEPT = 50
"""The newest are."""


class NotEvaluated(str):
    """The warning that an epoch, which counts from 0, has no evaluation. Those of one reason are
    kept as one."""

    def __new__(cls, epoch: int, why: str) -> NotEvaluated:
        """``why`` is what the text of it ends with: a colon and the reason."""
        made = super().__new__(cls, f"epoch {epoch + 1} is not evaluated{why}")
        made.epoch, made.why = epoch, why
        return made

    epoch: int
    why: str


class Noticing(Protocol):
    """A part of the job that logs nothing itself: what it has noticed is taken out."""

    warnings: list[str]


class JobWarnings:
    """Logs each warning and keeps it; one that is kept already is not said again. Not
    thread-safe."""

    def __init__(self) -> None:
        self._epochs: dict[str, set[int]] = {}
        self._lines: dict[str, str] = {}
        """Of epochs without evaluation, by the reason."""
        self.kept: list[str] = []
        """In the order in which they came. Replaced by each that comes, so it may be read on."""

    def add(self, *warnings: str) -> None:
        """There is something to know."""
        for warning in warnings:
            if isinstance(warning, NotEvaluated):
                self._count(warning)
            elif warning not in self.kept:
                log.warning(warning)
                self.kept = [*self.kept, warning][-KEPT:]

    def _count(self, warning: NotEvaluated) -> None:
        epochs = self._epochs.setdefault(warning.why, set())
        if warning.epoch in epochs:
            return
        log.warning(warning)
        epochs.add(warning.epoch)
        line = str(warning)
        if len(epochs) > 1:
            newest = max(epochs) + 1
            line = f"{len(epochs)} epochs (the newest is {newest}) are not evaluated{warning.why}"
        before = self._lines.get(warning.why)
        self._lines[warning.why] = line
        if before in self.kept:
            # In its place, so that others do not fall behind it.
            self.kept = [line if kept == before else kept for kept in self.kept]
        else:
            self.kept = [*self.kept, line][-KEPT:]

    def take(self, part: Noticing) -> None:
        """What ``part`` has noticed since the last call."""
        noticed, part.warnings = part.warnings, []
        self.add(*noticed)
