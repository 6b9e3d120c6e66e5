"""A ledger that is rotten or forged is refused by name: no traceback, and nothing is awaited."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.records.ledger_file import DamagedLedger, unreadable_ledger
from coordinator.records.run_directory import LEDGER
from coordinator.records.store import Store
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision
from tests.psrpc.checkpoint.test_forgery import PLACED

POLICY = {"number": 1, "settings": {"mode": "async"}, "step": 0, "batches": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with something of everything."""
    with Store(tmp_path / LEDGER) as store:
        store.put_all({"generation": 2, "since": 1, "policies": [POLICY], "ended": None})
        store.put("identity", {"run_id": "a", "first": {"mode": "async"}, "policy": None})
        store.put("restored", [[2, 1, 5], [3, 2, 7, [0]]])
        store.put("first_loss", 0.5)
        store.put_decision(Decision(2, 7, (Attempt(BatchId(0, 4, 4), 1 << 40),)))
        store.put_incarnation("shard", "0", 2**63 - 1, 2, "host:1")
        store.put_evaluation("epoch-0", 1, 10, {"loss": float("nan")})
        store.put_checkpoint("step-00000010", 1, 10)
    return tmp_path / LEDGER


def read_all(store: Store) -> None:
    for key in ("generation", "since", "policies", "ended", "identity", "first_loss"):
        store.get(key)
    store.restored()
    store.last_decision(0)
    store.incarnations("shard")
    store.evaluations()
    store.scores("loss")
    store.newest_checkpoint()


@contextlib.contextmanager
def changed(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def use(store: Store, read: Callable[[Store], None]) -> None:
    try:
        read(store)
        read_all(store)
    finally:
        store.close()


def refused(path: Path) -> str:
    """Why it cannot be used, the same in both ways of opening it."""
    said = set()
    for read in (Store.open, Store.open_to_read):
        with pytest.raises(DamagedLedger) as caught:
            use(Store(path), read)
        said.add(str(caught.value))
    (line,) = said
    assert str(path.parent) in line
    assert str(unreadable_ledger(path, caught.value)) == line
    return line


def test_a_written_ledger_is_read(path: Path) -> None:
    with Store(path) as store:
        read_all(store)


@pytest.mark.parametrize(("place", "words"), [p for p in PLACED if "bytes" not in p[1]])
@pytest.mark.parametrize("suffix", ["", "-wal", "-journal"])
def test_a_ledger_that_is_no_file(
    path: Path, suffix: str, place: Callable[[Path], None], words: str
) -> None:
    there = path.with_name(path.name + suffix)
    there.unlink(missing_ok=True)
    place(there)
    assert f"{there} cannot be used: {words}" in refused(path)


def test_a_ledger_that_is_no_database(path: Path) -> None:
    path.write_text("no database " * 1000)
    assert refused(path) == f"{path} is damaged: file is not a database"


def test_corrupt_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 * 2 :] = b"\xa5" * (len(data) - 4096 * 2)
    path.write_bytes(data)
    assert "database disk image is malformed" in refused(path)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM meta; END",
        "CREATE VIEW t AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) "
        "SELECT x FROM n",
    ],
)
def test_triggers_and_views_are_refused(path: Path, statement: str) -> None:
    with changed(path) as connection:
        connection.execute(statement)
    assert "it has 't', which no coordinator makes" in refused(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("generation", "2", "generation is '2'; expected a whole number"),
        ("generation", True, "generation is True; expected a whole number"),
        ("generation", -1, "generation is -1; expected a whole number"),
        ("since", 2**70, "since: number '1180591620717411303424' does not fit 64 bits"),
        ("policies", {}, "policies is {}; expected a list"),
        ("policies", [{**POLICY, "settings": {"mode": "x"}}], "policies[0].settings: mode is 'x'"),
        ("policies", [{**POLICY, "settings": []}], "policies[0].settings is []"),
        ("policies", [{"number": 1}], "policies[0] has no 'settings'"),
        ("identity", [], "identity is []; expected an object"),
        ("identity", {"run_id": 7}, "identity.run_id is 7; expected text"),
        ("restored", [[1]], "restored[0] is [1]; expected a generation"),
        ("restored", [[1, 2, "3"]], "restored[0][2] is '3'; expected a whole number"),
        ("ended", {"phase": []}, "ended has no 'reason'"),
        ("first_loss", "0.5", "first_loss is '0.5'; expected a number"),
    ],
)
def test_a_value_of_another_kind(path: Path, key: str, value: Any, words: str) -> None:
    with changed(path) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = ?", (json.dumps(value), key))
    assert words in refused(path)


@pytest.mark.parametrize("value", [b"\xff\x00", 7, "torn{", "[" * 100_000, '{"a": 1, "a": 2}'])
def test_a_value_that_is_no_json(path: Path, value: object) -> None:
    with changed(path) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'identity'", (value,))
    assert "is damaged: identity: " in refused(path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE decisions SET decision = '{}'",
        "UPDATE decisions SET decision = replace(decision, '[{', '[[],{')",
        "UPDATE incarnations SET incarnation = 'x'",
        "UPDATE incarnations SET member = x'ff'",
        "UPDATE evaluations SET results = '[]'",
        "UPDATE evaluations SET global_step = 'x'",
        "UPDATE checkpoints SET name = '../x'",
        "UPDATE checkpoints SET generation = -1",
        "DROP TABLE checkpoints; CREATE TABLE checkpoints (name, generation, global_step);"
        "INSERT INTO checkpoints VALUES (NULL, NULL, NULL)",
    ],
)
def test_a_row_of_another_kind(path: Path, statement: str) -> None:
    with changed(path) as connection:
        connection.executescript(statement)
    assert f"{path} is damaged: " in refused(path)
