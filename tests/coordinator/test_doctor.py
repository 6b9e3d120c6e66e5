"""What ``coordinator doctor`` says: real commands at real coordinators."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.certs import make_certificates
from coordinator.cli import main
from coordinator.client import CoordinatorClient
from psrpc.identity import Role
from psrpc.security import Security
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.parts import Served, make_run, serving


@dataclass
class Place:
    certs: Path
    plaintext: Served
    encrypted: Served


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    path = tmp_path_factory.mktemp("place")
    make_certificates(path / "certs", "one", datetime.now(UTC))
    for name in ("plain", "tls"):
        (path / name).mkdir()
    own = Security.from_options(Role.COORDINATOR, path / "certs")
    with (
        serving(make_run(path / "plain")) as plain,
        serving(make_run(path / "tls"), security=own) as tls,
    ):
        yield Place(path / "certs", plain, tls)


def doctor(*arguments: str | Path) -> int:
    return main(["doctor", *map(str, arguments)])


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Mark, step and the rest of each line."""
    out = capsys.readouterr().out
    return [line.split(maxsplit=2) for line in out.splitlines() if line[:1] in "✓✗"]


def test_all_is_well(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(place.encrypted.address, "--certs", place.certs) == 0
    said = lines(capsys)
    names = [
        "certificates",
        "name",
        "TCP",
        "TLS",
        "authorisation",
        "version",
        "job",
        "disk",
        "clock",
    ]
    assert [(mark, name) for mark, name, _ in said] == [("✓", name) for name in names]
    assert "waiting for" in said[6][2]


def test_a_machine_of_workers(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has a worker's files alone, and asks what a worker may ask."""
    for name in ("ca.crt", "worker.crt", "worker.key"):
        (tmp_path / name).write_bytes((place.certs / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    assert doctor(place.encrypted.address, "--certs", tmp_path) == 0
    assert [name for _, name, _ in lines(capsys)][-3:] == ["authorisation", "version", "job"]


def test_it_stops_at_the_first_that_fails(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(place.encrypted.address) == 1
    *passed, last = lines(capsys)
    assert [name for _, name, _ in passed] == ["name", "TCP"]
    assert last[:2] == ["✗", "TLS"]
    assert last[2].startswith("PS331: ")


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert doctor(f"127.0.0.1:{unused.getsockname()[1]}") == 1
    assert lines(capsys)[-1][2].startswith("PS204: ")


def test_the_run_directory_here(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(place.plaintext.address, "--run-dir", tmp_path) == 1
    assert lines(capsys)[-1][2].startswith("PS125: ")
    (tmp_path / "ledger.sqlite").touch()
    assert doctor(place.plaintext.address, "--run-dir", tmp_path) == 0


@pytest.mark.parametrize(
    ("status", "name", "code"),
    [
        ({"software": "0.0.1"}, "version", "PS131"),
        ({"phase": "failed", "reason": "PS603: ten NaN"}, "job", "PS603"),
        ({"free_nbytes": 1000}, "disk", "PS502"),
        ({"clock_s": 1.0}, "clock", "PS507"),
    ],
)
def test_what_is_wrong_at_the_coordinator(
    place: Place,
    status: dict[str, object],
    name: str,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask = CoordinatorClient.get_job_status

    def answer(client: CoordinatorClient) -> pb.GetJobStatusResponse:
        found = ask(client)
        found.MergeFrom(pb.GetJobStatusResponse(**status))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(CoordinatorClient, "get_job_status", answer)
    assert doctor(place.plaintext.address) == 1
    mark, step, said = lines(capsys)[-1]
    assert (mark, step) == ("✗", name)
    assert said.startswith(f"{code}: ")
