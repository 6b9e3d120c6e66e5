"""Which ids a table has removed, for as long as it remembers them."""

from __future__ import annotations

from collections import deque

import numpy as np

from psrpc.core.tables import Ids


class Removals:
    """Ids by the version that removed them, at most ``limit``: the oldest are forgotten first.

    Nothing is known of what was before the first version that :meth:`begin` names.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._removed: deque[tuple[int, Ids]] = deque()
        self._known_from: int | None = None
        self._ids = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return 8 * self._ids

    def begin(self, version: int) -> None:
        """An update makes ``version`` of the one before."""
        if self._known_from is None:
            self._known_from = version - 1

    def add(self, version: int, ids: Ids) -> None:
        """``version`` removed ``ids``."""
        self._removed.append((version, ids))
        self._ids += len(ids)
        while self._ids > self._limit:
            self._known_from, forgotten = self._removed.popleft()
            self._ids -= len(forgotten)

    def copy(self) -> Removals:
        """One that later removals do not change; the ids themselves are shared."""
        other = Removals(self._limit)
        other._removed = self._removed.copy()
        other._known_from, other._ids = self._known_from, self._ids
        return other

    def since(self, version: int) -> Ids | None:
        """The ids that later versions than ``version`` removed, ascending; None if not known."""
        if self._known_from is not None and version < self._known_from:
            return None
        found = [ids for at, ids in self._removed if at > version]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
