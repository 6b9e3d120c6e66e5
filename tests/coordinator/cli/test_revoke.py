"""``coordinator revoke`` against a coordinator on a port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli.__main__ import main
from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import AccessDenied
from tests.coordinator.builders import Served, make_run, serving
from tests.coordinator.fakes import WorkerDouble


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(make_run(tmp_path)) as found:
        yield found


@pytest.fixture
def worker(served: Served) -> Iterator[WorkerDouble]:
    with CoordinatorClient(served.address) as client:
        found = WorkerDouble(client, 5)
        found.register()
        yield found


@pytest.mark.parametrize("bar", [False, True])
def test_the_command_revokes_a_worker_and_says_so(
    served: Served, worker: WorkerDouble, capsys: pytest.CaptureFixture[str], bar: bool
) -> None:
    options = ["--reason", "its machine is not ours", *(["--bar"] if bar else [])]
    assert main(["revoke", "worker-0", *options, "--coordinator", served.address]) == 0
    after = "may not register again" if bar else "may register again"
    said, last = capsys.readouterr().out.splitlines()
    assert "its machine is not ours" in said, "the coordinator's log has it"
    assert last == f"revoked worker-0: its batches go to others; its process {after}"
    assert worker.heartbeat().unknown
    if bar:
        with pytest.raises(AccessDenied):
            worker.register()
    else:
        assert worker.register() == "worker-1"


def test_a_worker_that_is_not_there_is_an_error(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["revoke", "worker-7", "--coordinator", served.address]) == 2
    assert capsys.readouterr().err == (
        "error PS110: there is no worker 'worker-7'; `coordinator status` lists those of the job\n"
    )


def test_the_command_finds_the_coordinator_by_its_run_directory(
    served: Served, worker: WorkerDouble, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "address").write_text(served.address + "\n")
    assert main(["revoke", worker.name, "--run-dir", str(tmp_path)]) == 0
    assert "revoked worker-0: its batches" in capsys.readouterr().out
    assert main(["revoke", worker.name, "--run-dir", str(tmp_path / "other")]) == 2
    assert "no coordinator runs on" in capsys.readouterr().err
