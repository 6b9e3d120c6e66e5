"""``coordinator dashboard`` beside a coordinator that it reaches over TLS alone."""

from __future__ import annotations

import itertools
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from coordinator.certificates.authority import make_certificates
from coordinator.cli.__main__ import main
from coordinator.cli.dashboard import INTERRUPTED, follow_status
from coordinator.client.client import CoordinatorClient
from coordinator.dashboard.relay import Relay
from coordinator.dashboard.snapshots import DashboardSnapshots
from coordinator.launch.commands import reserved_address
from psrpc.core.errors import PsError
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import make_run, serving
from tests.e2e.cluster import Process

PATIENT = ("--connect-timeout", "120")

BEFORE = 1_700_000_000.0
"""When the job was seen first: long before anybody looked on."""


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "tiny"
    make_certificates(directory, "tiny", datetime.now(UTC))
    return directory


def ask(url: str, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url + path, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def board_of(run_dir: Path, wall_clock: Any = time.time) -> DashboardSnapshots:
    board = DashboardSnapshots("tiny", wall_clock)
    board.open("r1", run_dir)
    return board


def status(phase: str = "training", step: int = 1) -> pb.GetJobStatusResponse:
    return pb.GetJobStatusResponse(
        job="tiny", run_id="r1", phase=phase, global_step=step, loss=0.25
    )


@pytest.mark.slow
def test_it_shows_what_was_before_it_and_outlives_a_restart(certs: Path, tmp_path: Path) -> None:
    security = Security.from_options(Role.COORDINATOR, certs)
    run = make_run(tmp_path)
    first = board_of(tmp_path, lambda: BEFORE)
    first.show(status())
    with ExitStack() as held:
        address = held.enter_context(reserved_address())
        options = ("--coordinator", address, "--certs", certs, "--bind", "127.0.0.1:0", *PATIENT)
        command = Process("dashboard", "coordinator", "dashboard", *options)
        held.callback(command.end)
        command.wait_for("waiting for the coordinator .*nothing listens")
        with serving(run, security=security, board=first, address=address):
            url = command.wait_for(r"dashboard (http://127\.0\.0\.1:\d+)/ of the job at")[1]
            code, history = ask(url, "/history.json")
            recent = history["recent"]
            assert (code, recent["at"], recent["loss"]) == (200, [BEFORE], [0.25])
        command.wait_for("the coordinator is away: PS204: nothing listens at")
        code, said = ask(url, "/status.json")
        assert (code, said[:5]) == (503, "PS204")
        first.save()
        second = board_of(tmp_path)
        second.show(status(step=9))
        with serving(run, security=security, board=second, address=address):
            command.wait_for("the coordinator is back")
            assert ask(url, "/status.json")[1]["status"]["global_step"] == 9
            code, history = ask(url, "/history.json")
            assert history["recent"]["at"][0] == BEFORE
            assert "started again" in json.dumps(history["events"])
            second.show(status("done", step=10))
            # A browser here sees the end before it leaves.
            while ask(url, "/status.json")[1]["status"]["phase"] != "done":
                pass
            command.wait_for("the job has ended")
            assert command.wait() == 0
            assert second.subscribers.wait_until_seen(0)


def refused(capsys: pytest.CaptureFixture[str], *options: str | Path) -> str:
    assert main(["dashboard", *map(str, options)]) == 2
    out, err = capsys.readouterr()
    assert not out
    return err


@pytest.mark.slow
def test_others_see_it_only_when_that_was_said(
    certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--coordinator", "127.0.0.1:1", "--certs", certs)
    said = refused(capsys, *where, "--bind", "0.0.0.0:0")
    assert "PS110: --bind 0.0.0.0:0 would show the job" in said
    assert "or --public if all who reach it may look" in said
    # Then it is the coordinator that is missed.
    assert "nothing listens" in refused(capsys, *where, "--bind", "0.0.0.0:0", "--public")


@pytest.mark.slow
def test_obstacles_are_reported_as_by_other_commands(
    certs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other" / "tiny"
    make_certificates(other, "tiny", datetime.now(UTC))
    # A member that takes itself for an operator.
    worker = tmp_path / "worker"
    shutil.copytree(certs, worker)
    for kind in ("crt", "key"):
        shutil.copy(certs / f"worker.{kind}", worker / f"operator.{kind}")
    security = Security.from_options(Role.COORDINATOR, certs)
    with serving(make_run(tmp_path), security=security) as served:
        where = ("--coordinator", served.address, "--bind", "127.0.0.1:0")
        assert "PS331" in refused(capsys, *where)
        assert "PS333" in refused(capsys, *where, "--certs", other)
        assert "PS3" in refused(capsys, *where, "--certs", worker)
    assert "PS204" in refused(capsys, *where, "--certs", certs)


@pytest.mark.parametrize(
    ("option", "seconds"),
    [("away", "0"), ("away", "-1"), ("away", "nan"), ("connect", "-1"), ("connect", "nan")],
)
def test_a_time_that_cannot_be_meant(
    option: str, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "--coordinator", "127.0.0.1:1", f"--{option}-timeout", seconds)
    assert f"--{option}-timeout is {seconds}; expected seconds" in said


@pytest.fixture
def away(certs: Path) -> Iterator[CoordinatorClient]:
    """For a port without a listener."""
    with CoordinatorClient("127.0.0.1:1", Security.from_options(Role.OPERATOR, certs)) as client:
        yield client


def test_it_gives_up_in_the_end(
    away: CoordinatorClient, capsys: pytest.CaptureFixture[str]
) -> None:
    relay, ticks = Relay(time.monotonic), itertools.count()
    with pytest.raises(PsError, match="nothing listens"):
        follow_status(away, relay, lambda _: False, 5.0, clock=lambda: float(next(ticks)))
    # Each second it was tried; it was said once.
    assert next(ticks) == 6
    assert capsys.readouterr().out.count("the coordinator is away: PS204") == 1


def test_it_ends_when_it_is_told_to(away: CoordinatorClient) -> None:
    assert follow_status(away, Relay(time.monotonic), lambda _: True, 5.0) == INTERRUPTED
