"""The store: what went in is there after the process is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.run_directory import RunDirectory
from coordinator.store import Store
from coordinator.work import Attempt, Decision, SnapshotOrder
from psrpc.batch import BatchId
from psrpc.errors import AlreadyExists, InvalidJob

DECISION = Decision(
    2, 7, (Attempt(BatchId(0, 4, 4), 1 << 40),), (SnapshotOrder("s", 8, True, True, "d"),)
)


def test_everything_survives_reopening(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Store(path) as store:
        assert store.get("generation") is None
        store.put("generation", 2)
        store.put_decision(DECISION)
        store.put_incarnation("shard", "0", 2**63 - 1, 2, "host:1")
        store.put_evaluation("epoch-0", 1, 10, {"loss": 0.5})
        store.put_evaluation("epoch-1", 1, 20, {"loss": 0.4})
        store.put_evaluation("epoch-1", 2, 21, {"loss": 0.3})
        store.put_checkpoint("step-00000008", 2, 8)
    with Store(path) as store:
        assert store.get("generation") == 2
        assert store.last_decision(2) == DECISION
        assert store.last_decision(1) is None
        assert store.evaluations() == [
            ("epoch-0", 10, {"loss": 0.5}),
            ("epoch-1", 21, {"loss": 0.3}),
        ]
        assert store.evaluations(up_to_step=20) == [
            ("epoch-0", 10, {"loss": 0.5}),
            ("epoch-1", 20, {"loss": 0.4}),
        ]


def test_old_decisions_are_dropped_and_the_newest_stay(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        for number in (0, 999, 1000, 2000):
            store.put_decision(Decision(1, number, ()))
        rows = store._run("SELECT round FROM decisions ORDER BY round").fetchall()
        assert [row[0] for row in rows] == [1000, 2000]


def test_a_run_directory_is_held_by_one_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory(path, resume=False) as directory:
        token = directory.new_token()
        assert (path / "token").read_text() == token
        assert (path / "token").stat().st_mode & 0o777 == 0o600
        directory.write_address("127.0.0.1:5000")
        with Store(path / "ledger.sqlite"):
            pass
        with pytest.raises(AlreadyExists, match="another coordinator is running"):
            RunDirectory(path, resume=True).__enter__()
    assert not (path / "address").exists()
    with pytest.raises(AlreadyExists, match="holds a run already; say --resume"):
        RunDirectory(path, resume=False).__enter__()
    with RunDirectory(path, resume=True) as directory:
        assert directory.new_token() != token


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"holds no run \(it has no ledger.sqlite\)"):
        RunDirectory(tmp_path / "none", resume=True).__enter__()
