"""The ledger on a file system that several machines may have mounted."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from coordinator.records import ledger_file
from coordinator.records.store import Store
from psrpc.core.commands import Decision


def journal(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    connection.close()
    return str(mode)


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "network_file_system", lambda _path: "nfs4")


@pytest.mark.usefixtures("on_nfs")
def test_a_ledger_on_a_network_needs_no_memory_that_processes_share(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Store(path) as store:
        store.put_decision(Decision(1, 0, ()))
        assert not path.with_name(path.name + "-shm").exists()
        assert not path.with_name(path.name + "-wal").exists()
        # Commands read it while the coordinator writes.
        reader = Store(path)
        reader.open_to_read()
        assert reader.last_decision(1) == Decision(1, 0, ())
        store.put_decision(Decision(1, 1, ()))
        assert reader.last_decision(1) == Decision(1, 1, ())
        reader.close()
    assert journal(path) != "wal"


def test_a_run_that_moves_between_file_systems_keeps_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    for number, kind in enumerate(("", "nfs4", "")):
        monkeypatch.setattr(ledger_file, "network_file_system", lambda _path, kind=kind: kind)
        with Store(path) as store:
            if number:
                assert store.last_decision(1) == Decision(1, number - 1, ())
            store.put_decision(Decision(1, number, ()))
    assert journal(path) == "wal"
