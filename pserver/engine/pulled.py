"""What workers compute from, as far as a shard keeps it."""

from __future__ import annotations

from pserver.core.requests import Values

MAX_VERSIONS = 32
"""Versions that are kept, each a copy of the shard's parameters."""

MAX_WORKERS = 1024
"""Workers of which it is known what they pulled."""


class Pulled:
    """The parameters that each worker pulled last, those of one version once for all of them.

    Whoever holds parameters makes the next update write elsewhere: that is what compensation
    costs. Not thread-safe.
    """

    def __init__(self) -> None:
        self._values: dict[int, Values] = {}
        self._versions: dict[str, int] = {}
        """By worker, the one that pulled last at the end."""

    def __len__(self) -> int:
        """How many versions are held."""
        return len(self._values)

    def remember(self, worker: str, values: Values) -> None:
        """``worker`` computes from ``values``, plain ones, from now on."""
        self.forget(worker)
        if len(self._versions) >= MAX_WORKERS:
            self.forget(next(iter(self._versions)))
        self._versions[worker] = values.version
        self._values[values.version] = values
        if len(self._values) > MAX_VERSIONS:
            oldest = min(self._values)
            del self._values[oldest]
            self._versions = {w: v for w, v in self._versions.items() if v != oldest}

    def of(self, version: int) -> Values | None:
        """The parameters of ``version``, if some worker has them."""
        return self._values.get(version)

    def forget(self, worker: str) -> None:
        """``worker`` computes from nothing any more."""
        version = self._versions.pop(worker, None)
        if version is not None and version not in self._versions.values():
            del self._values[version]

    def clear(self) -> None:
        """Nobody computes from anything."""
        self._values.clear()
        self._versions.clear()
