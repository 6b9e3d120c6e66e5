"""Frozen tables, for as long as anybody reads them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from pserver.tables.tables import FrozenTables


class Freeze:
    """Tables as they were at one moment, closed by the last of those who hold them.

    Thread-safe by ``lock``, which is the shard's: the tables change under it, and may only be read
    under it. It may be taken again by a thread that has it.
    """

    def __init__(self, tables: FrozenTables, lock: AbstractContextManager[object]) -> None:
        self.tables = tables
        self.lock = lock
        self._holders = 0

    def hold(self) -> Callable[[], None]:
        """One more who reads them. Returns what lets go of them again; more than once is no
        error."""
        self._holders += 1
        held = True

        def let_go() -> None:
            nonlocal held
            with self.lock:
                if held:
                    held = False
                    self._holders -= 1
                    if not self._holders:
                        self.tables.close()

        return let_go
