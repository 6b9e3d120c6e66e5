"""The coordinator's store on a database in memory, which outlives it and is refused at times."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import ClassVar

from coordinator.records.ledger_file import LedgerFile
from coordinator.records.store import Store
from coordinator.records.stored_values import ENDED
from tests.sim.faults import Faults
from tests.sim.schedule import Crash


class StoreFile:
    """The part of a store that lasts from one coordinator to the next."""

    _spare: ClassVar[list[sqlite3.Connection]] = []
    """Databases with all tables and no rows: making tables takes longer than all that follows."""

    def __init__(self) -> None:
        # A new one is made without faults: a run must not depend on those before it.
        self.connection = self._spare.pop() if self._spare else _Memory().make()

    def forget_the_end(self) -> None:
        """The run has not ended."""
        self.connection.rollback()
        self.connection.execute("DELETE FROM meta WHERE key = ?", (ENDED,))

    def close(self) -> None:
        """Drops it."""
        self.connection.rollback()
        names = self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        for (name,) in names.fetchall():
            self.connection.execute(f"DELETE FROM {name}")
        self._spare.append(self.connection)


class FaultyStore(Store):
    """The real one, on a :class:`_FaultyFile`."""

    def __init__(self, file: StoreFile, faults: Faults) -> None:
        super().__init__(Path(":memory:"))
        self._file = _FaultyFile(file, faults)


class _Memory(LedgerFile):
    """The real one, on a database in memory."""

    def __init__(self) -> None:
        super().__init__(Path(":memory:"))

    def make(self) -> sqlite3.Connection:
        """Returns a new database with all tables and no rows."""
        self.open()
        assert self._connection is not None
        return self._connection

    def _make_private(self) -> None:
        """Memory has no file."""

    def _reserve(self) -> None:
        """Memory needs no reserve."""


class _FaultyFile(LedgerFile):
    """The real one, on a database that exists. Its transactions are SQLite's; the process may die
    before or after each statement, and the disk may refuse one."""

    def __init__(self, file: StoreFile, faults: Faults) -> None:
        super().__init__(Path(":memory:"))
        self._file = file
        self._faults = faults

    def open(self) -> None:
        # What a dead process left open never happened.
        self._file.connection.rollback()
        self._connection = self._file.connection

    def run(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement.startswith(("SELECT", "ROLLBACK")):
            return super().run(statement, *values)
        if self._faults.strikes("crash at the store"):
            raise Crash
        if self._faults.strikes("store refuses") and statement.startswith(("INSERT", "COMMIT")):
            raise sqlite3.OperationalError("disk I/O error")
        cursor = super().run(statement, *values)
        if self._faults.strikes("crash at the store"):
            raise Crash
        return cursor
