"""The SQLite ledger of a run: all state of the coordinator that shards cannot report to it."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, SnapshotOrder
from psrpc.core.document import (
    Check,
    anything,
    flag,
    listed,
    mapped,
    maybe,
    parse_json,
    real,
    real_or_nan,
    record,
    text,
    whole,
    wrong,
)
from psrpc.core.errors import CheckpointError, InvalidArgument, InvalidJob
from psrpc.core.names import check_file_name
from psrpc.core.policy import Policy
from psrpc.files.storage import check_regular, make_private

GENERATION = "generation"
SINCE = "since"
"""The generation since which all shards have kept their parameters."""

RESTORED = "restored"
"""For each generation that restored a checkpoint: its number, the generation and global step of
that checkpoint, and the shards that kept their parameters. Only for jobs with tables."""

POLICIES = "policies"
"""The policies of the run: number, settings, global step and batches done when each began; null
while the first one is in force."""

TWICE = "counted_twice"
"""Number of batches that may have counted twice on some of the parameters; null for none."""

ENDED = "ended"
"""The end of the run: phase and reason; null while it runs."""

BARRED = "barred"
"""Processes that may not register: ``coordinator.membership.membership.Membership.barred``."""

IDENTITY = "identity"
"""The identity of the run, see :mod:`coordinator.process.settling`."""

FIRST = "first"
"""Key of the identity: the policy that the run began with."""

FIRST_LOSS = "first_loss"
"""The guard's reference loss, which a resumed job keeps; null until it is known."""

KEPT_DECISIONS = 8
"""Decisions that stay in the store; recovery needs only the newest."""

KEPT_INCARNATIONS = 1000
"""Registered processes that the store keeps per role, the newest."""

KEPT_CHECKPOINTS = 1000
"""Checkpoints that the store remembers, the newest."""

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

_LARGEST_ID = (1 << 63) - 1
"""Incarnations and attempts use all bits of SQLite's signed integer."""

_ROTTEN = ("SQLITE_NOTADB", "SQLITE_CORRUPT")


class DamagedLedger(sqlite3.DatabaseError):
    """The file is not one that a coordinator wrote; the message names it and says what is wrong."""


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


class RestoredGeneration(NamedTuple):
    """The generation ``formed`` from a checkpoint, the generation and global step of that
    checkpoint, and the shards that ``kept`` their parameters instead."""

    formed: int
    generation: int
    global_step: int
    kept: Sequence[int] = ()


def _policy(value: Any, where: str) -> Any:
    """Accepts the settings of a policy."""
    try:
        Policy.from_json(mapped(anything)(value, where))
    except InvalidJob as error:
        raise ValueError(f"{where}: {error}") from None
    return value


def _restored(value: Any, where: str) -> Any:
    """Accepts the fields of a :class:`RestoredGeneration`."""
    numbers = listed(whole(), most=3, least=3)
    if type(value) is not list or not 3 <= len(value) <= 4:
        raise wrong(value, where, "a generation, a checkpoint's and its step, and shards")
    numbers(value[:3], where)
    for kept in value[3:]:
        listed(whole())(kept, where)
    return value


_VALUES: Mapping[str, Check] = {
    GENERATION: maybe(whole()),
    SINCE: maybe(whole()),
    RESTORED: maybe(listed(_restored)),
    POLICIES: maybe(
        listed(
            record(
                {"number": whole(), "settings": _policy, "step": whole(), "batches": whole()},
                {"rate": real},
            )
        )
    ),
    TWICE: maybe(whole()),
    ENDED: maybe(record({"phase": text, "reason": text}, more=True)),
    IDENTITY: maybe(
        record(
            {"run_id": text},
            {FIRST: _policy, "policy": maybe(_policy), "overrides": mapped(text)},
            more=True,
        )
    ),
    FIRST_LOSS: maybe(real),
    BARRED: maybe(mapped(text)),
}


def _file_name(value: Any, where: str) -> Any:
    """Accepts the name of a checkpoint."""
    try:
        return check_file_name(text(value, where), where)
    except InvalidArgument as error:
        raise ValueError(str(error)) from None


_EPOCH = record(
    {
        "epoch": whole(),
        "step": whole(),
        "training": mapped(real_or_nan),
        "evaluation": mapped(real_or_nan),
        "learning_rate": maybe(real),
    },
    {"checkpoint": text, "eval_step": maybe(whole())},
)

_ID = whole(0, _LARGEST_ID)
_DECISION = record(
    {
        "generation": whole(),
        "round": whole(),
        "attempts": listed(
            record(
                {
                    "batch": record(dict.fromkeys(("epoch", "first", "count"), whole())),
                    "number": _ID,
                }
            )
        ),
        "snapshots": listed(
            record(
                {"name": text, "global_step": whole()},
                {"keep": flag, "write": flag, "directory": text, "base": text, "parts": whole()},
            )
        ),
    }
)


class Store:
    """``ledger.sqlite`` in the run directory. Every method is one short transaction that is on disk
    when it returns (0.2 ms). For one thread; call ``open`` and ``close``, or use ``with``.

    Every method raises ``sqlite3.Error`` when the disk refuses, and its subclass DamagedLedger when
    the file does not hold what was written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Opens or creates the file, readable by its owner alone."""
        self._make_private()
        self._connect(str(self._path))
        try:
            self._run("PRAGMA journal_mode = WAL")
            # A decision that was sent must survive a power failure.
            self._run("PRAGMA synchronous = FULL")
            self._run(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
            for statement in _SCHEMA.split(";"):
                self._run(statement)
        except BaseException:
            self.close()
            raise
        # A run must go on even if the disk is already full.
        with contextlib.suppress(sqlite3.OperationalError):
            self._reserve()

    def open_to_read(self) -> None:
        """Opens the file read-only, even while a coordinator has it open."""
        self._connect(f"{self._path.absolute().as_uri()}?mode=ro")

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
            foreign = self._run(query).fetchone()
            if foreign is not None:
                raise self._damaged(f"it has {foreign[0]!r}, which no coordinator makes")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Store:
        self.open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def get(self, key: str) -> Any:
        """Returns a value that was :meth:`put`, or None."""
        row = self._run("SELECT value FROM meta WHERE key = ?", key).fetchone()
        check = _VALUES.get(key, anything)
        return None if row is None else self._read(row[0], check, key)

    def check(self) -> None:
        """Reads all that a coordinator needs, so that damage shows before anything relies on it."""
        for key in _VALUES:
            self.get(key)
        self.last_decision(0)
        for role in ("shard", "worker"):
            self.incarnations(role)
        self.evaluations()
        self.newest_checkpoint()
        self.epochs()

    def restored(self) -> list[RestoredGeneration]:
        """Returns the generations that restored a checkpoint, oldest first."""
        return [RestoredGeneration(*one) for one in self.get(RESTORED) or ()]

    def put(self, key: str, value: Any) -> None:
        """Stores a JSON value: generation, policy, the job's identity."""
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))

    def put_all(self, values: Mapping[str, Any]) -> None:
        """Stores several values, or none of them."""
        with self._transaction():
            for key, value in values.items():
                self.put(key, value)

    def put_incarnation(
        self, role: str, member: str, incarnation: int, generation: int, address: str
    ) -> None:
        """Records that a process took a place."""
        with self._transaction():
            self._run(
                "INSERT OR REPLACE INTO incarnations VALUES (?, ?, ?, ?, ?, ?)",
                *(role, member, incarnation, generation, address, _utc()),
            )
            self._run(
                "DELETE FROM incarnations WHERE role = ? AND rowid NOT IN (SELECT rowid FROM "
                "incarnations WHERE role = ? ORDER BY rowid DESC LIMIT ?)",
                *(role, role, KEPT_INCARNATIONS),
            )

    def incarnations(self, role: str) -> list[tuple[str, int]]:
        """Returns ``(member, incarnation)`` of the processes that took a place, oldest first."""
        rows = self._run(
            "SELECT member, incarnation FROM incarnations WHERE role = ? ORDER BY rowid", role
        )
        return [
            (self._checked(member, text, "member"), self._checked(number, _ID, "incarnation"))
            for member, number in rows
        ]

    def put_decision(self, decision: Decision) -> None:
        """Stores a decided round, idempotently. Only a stored decision may be sent."""
        text = json.dumps(asdict(decision), separators=(",", ":"))
        key = (decision.generation, decision.round)
        with self._transaction():
            self._run("INSERT OR REPLACE INTO decisions VALUES (?, ?, ?)", *key, text)
            self._run(
                "DELETE FROM decisions WHERE generation < ? OR round <= ?",
                *(decision.generation, decision.round - KEPT_DECISIONS),
            )

    def last_decision(self, since: int) -> Decision | None:
        """Returns the newest decision of generation ``since`` or later."""
        row = self._run(
            "SELECT decision FROM decisions WHERE generation >= ? "
            "ORDER BY generation DESC, round DESC LIMIT 1",
            since,
        ).fetchone()
        return None if row is None else _decision(self._read(row[0], _DECISION, "decision"))

    def put_evaluation(
        self, evaluation: str, generation: int, global_step: int, results: Mapping[str, float]
    ) -> None:
        """Stores the results of a finished evaluation."""
        self._run(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)",
            *(evaluation, generation, global_step, json.dumps(dict(results))),
        )

    def evaluations(self, up_to_step: int | None = None) -> list[tuple[str, int, dict[str, float]]]:
        """Returns ``(evaluation, global_step, results)``, oldest first; of two evaluations of the
        same name the newest generation's counts."""
        rows = self._run(
            "SELECT evaluation, global_step, results FROM evaluations ORDER BY generation, rowid"
        )
        newest: dict[str, tuple[str, int, dict[str, float]]] = {}
        for name, step, results in rows:
            self._checked(name, text, "evaluation")
            self._checked(step, whole(), "global_step")
            if up_to_step is None or step <= up_to_step:
                newest[name] = (name, step, self._read(results, mapped(real_or_nan), "results"))
        return sorted(newest.values(), key=lambda row: row[1])

    def put_epoch(self, epoch: int, row: Mapping[str, Any]) -> None:
        """Stores the row of an epoch, see :class:`coordinator.records.epochs.EpochRow`."""
        self._run("INSERT OR REPLACE INTO history VALUES (?, ?)", epoch, json.dumps(dict(row)))

    def epochs(self) -> list[dict[str, Any]]:
        """Returns the rows of all epochs, in rising order."""
        rows = self._run("SELECT row FROM history ORDER BY epoch")
        return [self._read(row[0], _EPOCH, "history") for row in rows]

    def forget_epochs(self, epochs: Collection[int]) -> None:
        """Deletes the rows of these epochs."""
        with self._transaction():
            for epoch in epochs:
                self._run("DELETE FROM history WHERE epoch = ?", epoch)

    def put_checkpoint(self, name: str, generation: int, global_step: int) -> None:
        """Records a committed checkpoint; the manifest on disk is authoritative."""
        with self._transaction():
            self._run(
                "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)",
                *(name, generation, global_step, _utc()),
            )
            self._run(
                "DELETE FROM checkpoints WHERE rowid <= (SELECT max(rowid) FROM checkpoints) - ?",
                KEPT_CHECKPOINTS,
            )

    def newest_checkpoint(self) -> tuple[str, int, int] | None:
        """Returns ``(name, generation, global_step)`` of the checkpoint committed last."""
        row = self._run(
            "SELECT name, generation, global_step FROM checkpoints ORDER BY rowid DESC LIMIT 1"
        ).fetchone()
        if row is None:
            return None
        name, *numbers = row
        self._checked(name, _file_name, "checkpoint")
        generation, step = (self._checked(number, whole(), "checkpoint") for number in numbers)
        return name, generation, step

    def scores(self, metric: str) -> dict[tuple[int, int], float]:
        """Returns the results of one metric, by generation and global step."""
        rows = self._run("SELECT generation, global_step, results FROM evaluations")
        scores = ((row[:2], self._read(row[2], mapped(real_or_nan), "results")) for row in rows)
        return {key: results[metric] for key, results in scores if metric in results}

    def _read(self, value: object, check: Check, what: str) -> Any:
        """Parses the JSON of a column, in which a loss may be NaN."""
        try:
            if not isinstance(value, str):
                raise wrong(value, "it", "text")
            return check(parse_json(value.encode(), finite=False), what)
        except ValueError as error:
            raise self._damaged(f"{what}: {error}") from None

    def _checked(self, value: Any, check: Check, what: str) -> Any:
        try:
            return check(value, what)
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, why: str) -> DamagedLedger:
        return DamagedLedger(f"{self._path} is damaged: {why}")

    def _reserve(self) -> None:
        """Grows the log and the file to the size they will need. SQLite reuses this space, and
        removes the log only when the file is closed."""
        self._run("INSERT INTO reserve VALUES (zeroblob(?))", RESERVED_BYTES)
        self._run("DELETE FROM reserve")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run("BEGIN IMMEDIATE")
        try:
            yield
            self._run("COMMIT")
        except BaseException:
            # The failed statement may have ended the transaction already.
            with contextlib.suppress(sqlite3.OperationalError):
                self._run("ROLLBACK")
            raise

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        assert self._connection is not None, "the store is not open"
        try:
            return self._connection.execute(statement, values)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorname", "").startswith(_ROTTEN):
                raise self._damaged(str(error)) from error
            raise


def _decision(document: dict[str, Any]) -> Decision:
    return Decision(
        generation=document["generation"],
        round=document["round"],
        attempts=tuple(Attempt(BatchId(**a["batch"]), a["number"]) for a in document["attempts"]),
        snapshots=tuple(SnapshotOrder(**s) for s in document["snapshots"]),
    )


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
