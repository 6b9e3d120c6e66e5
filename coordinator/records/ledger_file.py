"""The SQLite file of a run's ledger: its tables, how it is opened, and its transactions."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from psrpc.core.errors import CheckpointError
from psrpc.files.mounts import network_file_system
from psrpc.files.storage import check_regular, make_private
from psrpc.ops.logs import get_logger

log = get_logger()

RESERVED_BYTES = 1 << 20
"""Bytes that opening the file reserves in the file and in its log each, so that rounds can still be
decided on a disk that fills up later."""

LEDGER_NBYTES = 2 * RESERVED_BYTES
"""Approximate size of the file and its log together."""

LOG_PAGES = 128
"""Pages after which SQLite checkpoints its log into the file."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS incarnations (
    role TEXT NOT NULL, member TEXT NOT NULL, incarnation INTEGER NOT NULL,
    generation INTEGER NOT NULL, address TEXT NOT NULL, registered_utc TEXT NOT NULL,
    PRIMARY KEY (role, member, incarnation));
CREATE TABLE IF NOT EXISTS decisions (
    generation INTEGER NOT NULL, round INTEGER NOT NULL, decision TEXT NOT NULL,
    PRIMARY KEY (generation, round));
CREATE TABLE IF NOT EXISTS decisions_ahead (
    generation INTEGER NOT NULL, round INTEGER NOT NULL, decision TEXT NOT NULL,
    PRIMARY KEY (generation, round));
CREATE TABLE IF NOT EXISTS evaluations (
    evaluation TEXT NOT NULL, generation INTEGER NOT NULL, global_step INTEGER NOT NULL,
    results TEXT NOT NULL, PRIMARY KEY (evaluation, generation));
CREATE TABLE IF NOT EXISTS checkpoints (
    name TEXT NOT NULL, generation INTEGER NOT NULL, global_step INTEGER NOT NULL,
    committed_utc TEXT NOT NULL, PRIMARY KEY (name, generation));
CREATE TABLE IF NOT EXISTS history (epoch INTEGER PRIMARY KEY, row TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS reserve (filler BLOB);
"""

LONGEST_VALUE = 1 << 25
"""Largest value in bytes that SQLite may return."""

_SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite creates."""

_ROTTEN = ("SQLITE_NOTADB", "SQLITE_CORRUPT")


class DamagedLedger(sqlite3.DatabaseError):
    """The file is not one that a coordinator wrote; the message names the file and the fault."""


def damaged_ledger(error: DamagedLedger) -> CheckpointError:
    """Returns the error of a start that needs the ledger, with the remedy; a retry cannot help."""
    return CheckpointError(
        f"{error}; put an empty file in its place and say --resume to go on from the newest good "
        "checkpoint without it, or choose another --run-dir",
        code="PS406",
    )


def unreadable_ledger(path: Path, error: sqlite3.Error) -> CheckpointError:
    """Returns the error of a command that needs the ledger; names the file and the cause."""
    if isinstance(error, DamagedLedger):
        return CheckpointError(str(error), code="PS406")
    return CheckpointError(f"{path} cannot be read: {error}")


class LedgerFile:
    """An open connection to the file. For one thread.

    Its methods raise ``sqlite3.Error`` when the disk refuses, and DamagedLedger when the file is
    not one that a coordinator wrote.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Opens or creates the file, readable by its owner alone."""
        self._make_private()
        self._connect(str(self._path))
        try:
            self._choose_journal()
            # A decision that was sent must survive a power failure.
            self.run("PRAGMA synchronous = FULL")
            self.run(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
            for statement in _SCHEMA.split(";"):
                self.run(statement)
        except BaseException:
            self.close()
            raise
        # A run must go on even if the disk is already full.
        with contextlib.suppress(sqlite3.OperationalError):
            self._reserve()

    def open_to_read(self) -> None:
        """Opens the file read-only, even while a coordinator has it open."""
        self._connect(f"{self._path.absolute().as_uri()}?mode=ro")

    def _choose_journal(self) -> None:
        """Chooses a write-ahead log, or a rollback journal where other machines may have the file
        open: the log's index lies in shared memory, which only processes of one machine see."""
        kind = network_file_system(self._path)
        if not kind:
            self.run("PRAGMA journal_mode = WAL")
            return
        # With an exclusive lock, SQLite opens a file that was written with a log without the log's
        # index.
        self.run("PRAGMA locking_mode = EXCLUSIVE")
        (mode,) = self.run("PRAGMA journal_mode = PERSIST").fetchone()
        self.run("PRAGMA locking_mode = NORMAL")
        log.info("the ledger is on a network file system", kind=kind, journal=mode)

    def _make_private(self) -> None:
        with contextlib.suppress(OSError):
            # SQLite creates its other files with the mode of this one.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        for suffix in _SUFFIXES:
            make_private(self._path.with_name(self._path.name + suffix))

    def _connect(self, database: str) -> None:
        for suffix in _SUFFIXES:
            path = self._path.with_name(self._path.name + suffix)
            try:
                check_regular(path.stat().st_mode, path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise DamagedLedger(f"{path} cannot be used: {error.strerror}") from None
        connection = sqlite3.connect(
            database, uri=database.startswith("file:"), isolation_level=None
        )
        self._connection = connection
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
            # Triggers and views would run with each statement, for any length of time.
            query = "SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index')"
            foreign = self.run(query).fetchone()
            if foreign is not None:
                raise self.damaged(f"it has {foreign[0]!r}, which no coordinator makes")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Carries out the statements within together, or none of them."""
        self.run("BEGIN IMMEDIATE")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            # The failed statement may have ended the transaction already.
            with contextlib.suppress(sqlite3.OperationalError):
                self.run("ROLLBACK")
            raise

    def run(self, statement: str, *values: object) -> sqlite3.Cursor:
        """Carries out a statement."""
        assert self._connection is not None, "the store is not open"
        try:
            return self._connection.execute(statement, values)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorname", "").startswith(_ROTTEN):
                raise self.damaged(str(error)) from error
            raise

    def damaged(self, why: str) -> DamagedLedger:
        """Makes the error of a file whose contents are wrong."""
        return DamagedLedger(f"{self._path} is damaged: {why}")

    def _reserve(self) -> None:
        """Grows the log and the file to the size they will need. SQLite reuses this space, and
        removes the log only when the file is closed."""
        self.run("INSERT INTO reserve VALUES (zeroblob(?))", RESERVED_BYTES)
        self.run("DELETE FROM reserve")
