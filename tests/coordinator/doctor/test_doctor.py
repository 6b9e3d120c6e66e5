"""Output of ``coordinator doctor``: real commands at real coordinators."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.certificates.authority import make_certificates
from coordinator.cli.__main__ import main
from coordinator.client.client import CoordinatorClient
from coordinator.doctor.cli import add_arguments, doctor_security
from psrpc.core.names import CERTS
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import Served, make_run, serving


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
        "routes",
    ]
    assert [(mark, name) for mark, name, _ in said] == [("✓", name) for name in names]
    assert "waiting for" in said[6][2]


def copy_files(place: Place, to: Path, *roles: Role) -> None:
    """The files that a machine of these roles needs."""
    for name in ("ca.crt", *(f"{role}.{kind}" for role in roles for kind in ("crt", "key"))):
        (to / name).write_bytes((place.certs / name).read_bytes())
        (to / name).chmod(0o600)


@pytest.mark.parametrize(
    ("roles", "steps"),
    [
        ((Role.WORKER,), ["authorisation", "version", "job"]),
        ((Role.SHARD,), ["TLS", "authorisation", "job"]),
        ((Role.COORDINATOR,), ["TLS", "authorisation", "job"]),
        ((Role.READER,), ["disk", "clock", "routes"]),
        ((Role.SHARD, Role.WORKER), ["authorisation", "version", "job"]),
        ((Role.SHARD, Role.OPERATOR), ["disk", "clock", "routes"]),
    ],
)
def test_a_machine_of_some_roles(
    roles: tuple[Role, ...],
    steps: list[str],
    place: Place,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has their files alone, and asks what the one may ask that may ask most."""
    copy_files(place, tmp_path, *roles)
    assert doctor(place.encrypted.address, "--certs", tmp_path) == 0
    said = lines(capsys)
    assert f"{roles[-1]} of job one" in said[0][2]
    assert [name for _, name, _ in said][-3:] == steps


def test_a_reader_sees_the_status(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_files(place, tmp_path, Role.READER)
    address = place.encrypted.address
    assert main(["status", "--coordinator", address, "--certs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["phase"] == "waiting"


def test_a_shard_of_another_job(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_certificates(tmp_path / "other", "two", datetime.now(UTC))
    other = Place(tmp_path / "other", place.plaintext, place.encrypted)
    copy_files(other, tmp_path, Role.SHARD)
    assert doctor(place.encrypted.address, "--certs", tmp_path) == 1
    assert lines(capsys)[-1][:2] == ["✗", "TLS"]


def test_a_token_goes_before_the_files_beside_it(place: Place, tmp_path: Path) -> None:
    copy_files(place, tmp_path, Role.SHARD)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef" * 2)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--certs", str(tmp_path), "--token-file", str(token)])
    assert doctor_security(args).role == Role.OPERATOR


def test_plaintext_may_be_said_by_the_environment(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Then the certificates of a run are not looked for."""
    (tmp_path / "ledger.sqlite").touch()
    (tmp_path / CERTS).mkdir()
    at = (place.plaintext.address, "--run-dir", tmp_path)
    assert doctor(*at) == 1
    monkeypatch.setenv("PSERVER_INSECURE", "yes")
    assert doctor(*at) == 0
    capsys.readouterr()
    monkeypatch.setenv("PSERVER_INSECURE", "perhaps")
    assert doctor(*at) == 1
    assert "PSERVER_INSECURE='perhaps'; expected true or false" in lines(capsys)[-1][2]


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
def test_faults_at_the_coordinator(
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
