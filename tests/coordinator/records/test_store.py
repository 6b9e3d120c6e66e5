"""The store: what went in is there after the process is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.records import store as store_module
from coordinator.records.ledger_file import RESERVED_BYTES
from coordinator.records.run_directory import RunDirectory
from coordinator.records.store import KEPT_DECISIONS, Store
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, SnapshotOrder
from psrpc.core.errors import AlreadyExists, InvalidJob

FIRST = "first_loss"

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
        assert store.newest_checkpoint() is None
        store.put_checkpoint("step-00000016", 1, 16)
        store.put_checkpoint("step-00000008.g2", 2, 8)
    with Store(path) as store:
        assert store.get("generation") == 2
        assert store.last_decision(1) == DECISION
        assert store.last_decision(2) == DECISION
        assert store.last_decision(3) is None
        assert store.incarnations("shard") == [("0", 2**63 - 1)]
        assert store.newest_checkpoint() == ("step-00000008.g2", 2, 8)
        assert store.evaluations() == [
            ("epoch-0", 10, {"loss": 0.5}),
            ("epoch-1", 21, {"loss": 0.3}),
        ]
        assert store.scores("loss") == {(1, 10): 0.5, (1, 20): 0.4, (2, 21): 0.3}
        assert store.scores("accuracy") == {}


def rows(store: Store, table: str) -> int:
    found = store._file.run(f"SELECT count(*) FROM {table}").fetchone()
    return int(found[0])


def test_the_newest_decision_is_the_one_of_the_newest_generation(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        store.put_decision(Decision(1, 9, ()))
        store.put_decision(Decision(2, 7, ()))
        assert store.last_decision(1) == Decision(2, 7, ())
        store.put_decision(Decision(2, 7, ()))
        assert rows(store, "decisions") == 1


def test_the_store_does_not_grow_and_has_its_space_beforehand(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    attempts = tuple(Attempt(BatchId(0, 4 * k, 4), k) for k in range(8))

    def sizes() -> dict[str, int]:
        return {file.name: file.stat().st_size for file in tmp_path.iterdir()}

    with Store(path) as store:
        before = sizes()
        assert min(before["ledger.sqlite"], before["ledger.sqlite-wal"]) > RESERVED_BYTES
        for number in range(60):
            store.put_decision(Decision(1, number, attempts))
            store.put(FIRST, number)
        assert sizes() == before
        assert rows(store, "decisions") == KEPT_DECISIONS
    with Store(path):
        # The log goes when the file is closed.
        assert sizes()["ledger.sqlite-wal"] > RESERVED_BYTES
        assert sizes()["ledger.sqlite"] < before["ledger.sqlite"] + 100_000


def test_only_the_newest_members_and_checkpoints_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "KEPT_CHECKPOINTS", 10)
    monkeypatch.setattr(store_module, "KEPT_INCARNATIONS", 10)
    with Store(tmp_path / "ledger.sqlite") as store:
        for number in range(15):
            store.put_incarnation("worker", f"worker-{number}", number, 1, "host")
            store.put_checkpoint(f"step-{number:08d}", 1, number)
        store.put_incarnation("shard", "0", 1, 1, "host")
        names = [name for name, _ in store.incarnations("worker")]
        assert (len(names), names[0]) == (10, "worker-5")
        assert store.incarnations("shard") == [("0", 1)]
        assert rows(store, "checkpoints") == 10


def test_several_values_are_kept_or_none(tmp_path: Path) -> None:
    with Store(tmp_path / "ledger.sqlite") as store:
        store.put_all({"a": 1, "b": [2]})
        with pytest.raises(TypeError):
            store.put_all({"a": 3, "b": object()})
        assert (store.get("a"), store.get("b")) == (1, [2])


def test_a_run_directory_is_held_by_one_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory(path, resume=False) as directory:
        token = directory.new_token()
        assert (path / "token").read_text() == token
        assert (path / "token").stat().st_mode & 0o777 == 0o600
        directory.write_address("127.0.0.1:5000")
        with Store(path / "ledger.sqlite"):
            pass
        for resume in (True, False):
            with pytest.raises(AlreadyExists, match="another coordinator is running"):
                RunDirectory(path, resume=resume).__enter__()
    assert not (path / "address").exists()
    with RunDirectory(path, resume=False) as directory:
        assert directory.token() == token
        assert directory.new_token() != token


def test_an_unchanged_file_is_not_rewritten_but_touched(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, resume=False) as directory:
        directory.write_address("127.0.0.1:5000")
        path = tmp_path / "address"
        os.utime(path, (1, 1))
        inode = path.stat().st_ino
        directory.write_address("127.0.0.1:5000")
        assert path.stat().st_ino == inode
        assert path.stat().st_mtime > 1
        directory.write_address("127.0.0.1:5001", encrypted=True)
        assert path.read_text() == "127.0.0.1:5001\n"


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    none = tmp_path / "none"
    with pytest.raises(InvalidJob, match=f"--resume: there is no directory {none}"):
        RunDirectory(none, resume=True).__enter__()
    none.mkdir()
    with pytest.raises(InvalidJob, match=r"holds no run \(it has no ledger.sqlite\)"):
        RunDirectory(none, resume=True).__enter__()
