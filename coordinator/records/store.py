"""The SQLite ledger of a run: all state of the coordinator that shards cannot report to it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.records.ledger_file import LedgerFile
from coordinator.records.stored_values import (
    EPOCH,
    ID,
    RESTORED,
    VALUES,
    RestoredGeneration,
    stored_decision,
    stored_name,
)
from psrpc.core.commands import Decision, RoundsAhead
from psrpc.core.document import Check, anything, mapped, parse_json, real_or_nan, text, whole, wrong

KEPT_DECISIONS = 8
"""Decisions that stay in the store; recovery needs only the newest."""

KEPT_AHEAD = 4096
"""Rounds decided ahead that stay in the store: more than are ever decided and not carried out."""

KEPT_INCARNATIONS = 1000
"""Registered processes that the store keeps per role, the newest."""

KEPT_CHECKPOINTS = 1000
"""Checkpoints that the store remembers, the newest."""


class Store:
    """``ledger.sqlite`` in the run directory. Every method is one short transaction that is on disk
    when it returns (0.2 ms). For one thread; call ``open`` and ``close``, or use ``with``.

    Every method raises ``sqlite3.Error`` when the disk refuses, and its subclass DamagedLedger when
    the file's content is not as it was written.
    """

    def __init__(self, path: Path) -> None:
        self._file = LedgerFile(path)

    def open(self) -> None:
        """Opens or creates the file, readable by its owner alone."""
        self._file.open()

    def open_to_read(self) -> None:
        """Opens the file read-only, even while a coordinator has it open."""
        self._file.open_to_read()

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._file.close()

    def __enter__(self) -> Store:
        self.open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def get(self, key: str) -> Any:
        """Returns a value that was :meth:`put`, or None."""
        row = self._file.run("SELECT value FROM meta WHERE key = ?", key).fetchone()
        check = VALUES.get(key, anything)
        return None if row is None else self._read(row[0], check, key)

    def check(self) -> None:
        """Reads all values that a coordinator needs, so that damage shows before anything relies on
        them."""
        for key in VALUES:
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
        self._file.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))

    def put_all(self, values: Mapping[str, Any]) -> None:
        """Stores several values, or none of them."""
        with self._file.transaction():
            for key, value in values.items():
                self.put(key, value)

    def put_incarnation(
        self, role: str, member: str, incarnation: int, generation: int, address: str
    ) -> None:
        """Records that a process took a place."""
        with self._file.transaction():
            self._file.run(
                "INSERT OR REPLACE INTO incarnations VALUES (?, ?, ?, ?, ?, ?)",
                *(role, member, incarnation, generation, address, _utc()),
            )
            self._file.run(
                "DELETE FROM incarnations WHERE role = ? AND rowid NOT IN (SELECT rowid FROM "
                "incarnations WHERE role = ? ORDER BY rowid DESC LIMIT ?)",
                *(role, role, KEPT_INCARNATIONS),
            )

    def incarnations(self, role: str) -> list[tuple[str, int]]:
        """Returns ``(member, incarnation)`` of the processes that took a place, oldest first."""
        rows = self._file.run(
            "SELECT member, incarnation FROM incarnations WHERE role = ? ORDER BY rowid", role
        )
        return [
            (self._checked(member, text, "member"), self._checked(number, ID, "incarnation"))
            for member, number in rows
        ]

    def put_decision(self, decision: Decision) -> None:
        """Stores a decided round, idempotently. Only a stored decision may be sent."""
        with self._file.transaction():
            self._insert("decisions", decision)
            self._file.run(
                "DELETE FROM decisions WHERE generation < ? OR round <= ?",
                *(decision.generation, decision.round - KEPT_DECISIONS),
            )

    def put_ahead(self, ahead: RoundsAhead) -> None:
        """Stores rounds that are decided ahead, or none of them, idempotently. Only stored
        decisions may be sent; they may still not have been carried out."""
        with self._file.transaction():
            for decision in ahead.decisions:
                self._insert("decisions_ahead", decision)
            newest = ahead.decisions[-1].round
            # Old rounds go and newer ones stay, whatever their generation: shards may have gone on
            # from them in a later generation.
            self._file.run("DELETE FROM decisions_ahead WHERE round <= ?", newest - KEPT_AHEAD)

    def last_decision(self, since: int) -> Decision | None:
        """Returns the newest decision of generation ``since`` or later, except decisions made
        ahead."""
        return self._decision(
            "SELECT decision FROM decisions WHERE generation >= ? "
            "ORDER BY generation DESC, round DESC LIMIT 1",
            since,
        )

    def decision_ahead(self, since: int, number: int) -> Decision | None:
        """Returns the newest decision of round ``number`` that was made ahead in generation
        ``since`` or later."""
        return self._decision(
            "SELECT decision FROM decisions_ahead WHERE generation >= ? AND round = ? "
            "ORDER BY generation DESC LIMIT 1",
            *(since, number),
        )

    def newest_decision(self, since: int, versions: Collection[int]) -> Decision | None:
        """Returns the newest decision of generation ``since`` or later that only some shards may
        have carried out, if there is one; ``versions`` are those of all shards."""
        last = self.last_decision(since)
        ahead = self.decision_ahead(since, max(versions) - 1)
        if ahead is None or (last is not None and _order(last) >= _order(ahead)):
            return last
        # The rounds since the last one were decided ahead, each in the same generation as the one
        # before or a later one.
        return ahead if min(versions) < max(versions) else None

    def _insert(self, table: str, decision: Decision) -> None:
        text = json.dumps(asdict(decision), separators=(",", ":"))
        row = (decision.generation, decision.round, text)
        self._file.run(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", *row)

    def _decision(self, query: str, *values: int) -> Decision | None:
        row = self._file.run(query, *values).fetchone()
        return None if row is None else self._read(row[0], stored_decision, "decision")

    def put_evaluation(
        self, evaluation: str, generation: int, global_step: int, results: Mapping[str, float]
    ) -> None:
        """Stores the results of a finished evaluation."""
        self._file.run(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)",
            *(evaluation, generation, global_step, json.dumps(dict(results))),
        )

    def evaluations(self, up_to_step: int | None = None) -> list[tuple[str, int, dict[str, float]]]:
        """Returns ``(evaluation, global_step, results)``, oldest first; of several evaluations of
        one name, only the one of the newest generation."""
        rows = self._file.run(
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
        self._file.run("INSERT OR REPLACE INTO history VALUES (?, ?)", epoch, json.dumps(dict(row)))

    def epochs(self) -> list[dict[str, Any]]:
        """Returns the rows of all epochs, in rising order."""
        rows = self._file.run("SELECT row FROM history ORDER BY epoch")
        return [self._read(row[0], EPOCH, "history") for row in rows]

    def forget_epochs(self, epochs: Collection[int]) -> None:
        """Deletes the rows of these epochs."""
        with self._file.transaction():
            for epoch in epochs:
                self._file.run("DELETE FROM history WHERE epoch = ?", epoch)

    def put_checkpoint(self, name: str, generation: int, global_step: int) -> None:
        """Records a committed checkpoint; the manifest on disk is authoritative."""
        with self._file.transaction():
            self._file.run(
                "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)",
                *(name, generation, global_step, _utc()),
            )
            self._file.run(
                "DELETE FROM checkpoints WHERE rowid <= (SELECT max(rowid) FROM checkpoints) - ?",
                KEPT_CHECKPOINTS,
            )

    def newest_checkpoint(self) -> tuple[str, int, int] | None:
        """Returns ``(name, generation, global_step)`` of the checkpoint committed last."""
        row = self._file.run(
            "SELECT name, generation, global_step FROM checkpoints ORDER BY rowid DESC LIMIT 1"
        ).fetchone()
        if row is None:
            return None
        name, *numbers = row
        self._checked(name, stored_name, "checkpoint")
        generation, step = (self._checked(number, whole(), "checkpoint") for number in numbers)
        return name, generation, step

    def scores(self, metric: str) -> dict[tuple[int, int], float]:
        """Returns the results of one metric, by generation and global step."""
        rows = self._file.run("SELECT generation, global_step, results FROM evaluations")
        scores = ((row[:2], self._read(row[2], mapped(real_or_nan), "results")) for row in rows)
        return {key: results[metric] for key, results in scores if metric in results}

    def _read(self, value: object, check: Check, what: str) -> Any:
        """Parses the JSON of a column, in which a loss may be NaN."""
        try:
            if not isinstance(value, str):
                raise wrong(value, "it", "text")
            return check(parse_json(value.encode(), finite=False), what)
        except ValueError as error:
            raise self._file.damaged(f"{what}: {error}") from None

    def _checked(self, value: Any, check: Check, what: str) -> Any:
        try:
            return check(value, what)
        except ValueError as error:
            raise self._file.damaged(str(error)) from None


def _order(decision: Decision) -> tuple[int, int]:
    return decision.generation, decision.round


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
