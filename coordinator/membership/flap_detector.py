"""Worker processes that fall silent again and again without finishing a batch. Pure."""

from __future__ import annotations

OFTEN = 3
"""Lapses in a row that are worth a warning."""

KEPT = 200
"""Processes that are remembered."""


class Lapses:
    """Counts by incarnation: a process that was taken for gone and comes back is the same one under
    another name. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, incarnation: int) -> bool:
        """A process has fallen silent; whether it has done so :data:`OFTEN` times by now, with no
        batch done in between."""
        count = self._counts.pop(incarnation, 0) + 1
        self._counts[incarnation] = count  # the newest last
        if len(self._counts) > KEPT:
            del self._counts[next(iter(self._counts))]
        return count == OFTEN

    def done(self, incarnation: int) -> None:
        """A process has done batches."""
        self._counts.pop(incarnation, None)
