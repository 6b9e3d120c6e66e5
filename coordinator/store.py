"""What the coordinator must not forget, in SQLite: everything that shards cannot tell it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from coordinator.work import Attempt, Decision, SnapshotOrder
from psrpc.batch import BatchId

KEPT_DECISIONS = 1000
"""Rounds whose decision stays in the store; only the newest is ever needed again."""

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
"""


class Store:
    """``ledger.sqlite`` in the run directory. Every method is one short transaction that is on
    the disk when it returns (0.2 ms). Used from one thread; ``open`` and ``close``, or ``with``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Opens the file, or makes it."""
        connection = sqlite3.connect(self._path, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        # A decision that went out must still be there after a power failure.
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(_SCHEMA)
        self._connection = connection

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Store:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def get(self, key: str) -> Any:
        """A value that was :meth:`put`, or None."""
        row = self._run("SELECT value FROM meta WHERE key = ?", key).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        """Keeps a JSON value: generation, policy, the job's identity."""
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))

    def put_incarnation(
        self, role: str, member: str, incarnation: int, generation: int, address: str
    ) -> None:
        """Notes which process took a place."""
        self._run(
            "INSERT OR REPLACE INTO incarnations VALUES (?, ?, ?, ?, ?, ?)",
            *(role, member, incarnation, generation, address, _utc()),
        )

    def put_decision(self, decision: Decision) -> None:
        """Stores a decided round. Only after this may anyone see it."""
        text = json.dumps(asdict(decision), separators=(",", ":"))
        key = (decision.generation, decision.round)
        self._run("INSERT INTO decisions VALUES (?, ?, ?)", *key, text)
        if decision.round % KEPT_DECISIONS == 0:
            self._run(
                "DELETE FROM decisions WHERE generation < ? OR round < ?",
                *(decision.generation, decision.round - KEPT_DECISIONS),
            )

    def last_decision(self, generation: int) -> Decision | None:
        """The newest decision of a generation."""
        row = self._run(
            "SELECT decision FROM decisions WHERE generation = ? ORDER BY round DESC LIMIT 1",
            generation,
        ).fetchone()
        return None if row is None else _decision(json.loads(row[0]))

    def put_evaluation(
        self, evaluation: str, generation: int, global_step: int, results: Mapping[str, float]
    ) -> None:
        """Stores the results of a finished evaluation."""
        self._run(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)",
            *(evaluation, generation, global_step, json.dumps(dict(results))),
        )

    def evaluations(self, up_to_step: int | None = None) -> list[tuple[str, int, dict[str, float]]]:
        """``(evaluation, global_step, results)``, oldest first, the newest generation's word
        counting where two evaluated the same."""
        rows = self._run(
            "SELECT evaluation, global_step, results FROM evaluations ORDER BY generation, rowid"
        )
        newest: dict[str, tuple[str, int, dict[str, float]]] = {}
        for name, step, results in rows:
            if up_to_step is None or step <= up_to_step:
                newest[name] = (name, step, json.loads(results))
        return sorted(newest.values(), key=lambda row: row[1])

    def put_checkpoint(self, name: str, generation: int, global_step: int) -> None:
        """Notes a committed checkpoint; the manifest on the disk is what counts."""
        self._run(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)",
            *(name, generation, global_step, _utc()),
        )

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        assert self._connection is not None, "the store is not open"
        return self._connection.execute(statement, values)


def _decision(document: dict[str, Any]) -> Decision:
    return Decision(
        generation=document["generation"],
        round=document["round"],
        attempts=tuple(Attempt(BatchId(**a["batch"]), a["number"]) for a in document["attempts"]),
        snapshots=tuple(SnapshotOrder(**s) for s in document["snapshots"]),
    )


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
