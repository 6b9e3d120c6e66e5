"""The commands ``healthcheck``, against servers that do and do not serve."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client.core import GaugeMetricFamily

import coordinator.cli.__main__
import pserver.cli.__main__
import worker.cli.__main__
from coordinator.certificates.authority import certificates_of_run, make_certificates
from pserver.server.server import ShardServer
from psrpc.metrics.exporter import MetricsServer
from psrpc.net.channel import bind, make_server
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Server:
    address: str
    servicer: health.HealthServicer


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "certs", "tiny", datetime.now(UTC))
    return tmp_path / "certs"


def serve(security: Security) -> Iterator[Server]:
    servicer = health.HealthServicer()
    running = make_server(2, [], security)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    port = bind(running, "127.0.0.1:0", security)
    running.start()
    yield Server(f"127.0.0.1:{port}", servicer)
    running.stop(grace=None).wait()


@pytest.fixture
def server() -> Iterator[Server]:
    yield from serve(PLAINTEXT)


@pytest.fixture
def shard(certs: Path) -> Iterator[Server]:
    yield from serve(Security.from_options(Role.SHARD, certs))


def check(*said: str) -> int:
    return coordinator.cli.__main__.main(["healthcheck", *said])


def test_serving_is_zero(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.servicer.set("", SERVING)
    assert check(server.address) == 0
    assert pserver.cli.__main__.run(["healthcheck", server.address]) == 0
    assert capsys.readouterr() == ("", "")


def test_not_serving_is_one(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.servicer.set("psrpc.v1.Coordinator", NOT_SERVING)
    assert check(server.address, "--service", "psrpc.v1.Coordinator") == 1
    expected = f"unhealthy: psrpc.v1.Coordinator at {server.address} is NOT_SERVING\n"
    assert capsys.readouterr().err == expected


def test_an_unknown_service_is_one(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(server.address, "--service", "other") == 1
    assert capsys.readouterr().err == f"unhealthy: {server.address} does not know other\n"


def test_silence_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    # Accepts connections and never says a word.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert check(address, "--timeout", "0.05") == 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"unhealthy: PS213: {address} takes connections, but says nothing within"
    )


def test_that_nothing_listens_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """However long an answer would be waited for."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for run in (coordinator.cli.__main__.main, pserver.cli.__main__.run):
            assert run(["healthcheck", address, "--timeout", "1e6"]) == 1
            said = capsys.readouterr().err
            assert said.startswith(
                f"unhealthy: PS204: nothing listens at {address}; check the port"
            )


def test_without_an_address_the_newest_run_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PSERVER_COORDINATOR", raising=False)
    run_dir = Path("runs/one")
    run_dir.mkdir(parents=True)
    (run_dir / "job.json").write_text("{}")
    assert check() == 1
    said = capsys.readouterr().err
    assert said.startswith("unhealthy: PS201: no coordinator runs on runs/one: the run has not")
    certificates_of_run(run_dir / "certs", "one", datetime.now(UTC))
    own = Security.from_options(Role.COORDINATOR, run_dir / "certs")
    with contextmanager(serve)(own) as server:
        server.servicer.set("", SERVING)
        (run_dir / "address").write_text(server.address + "\n")
        assert [check(), check("--run-dir", str(run_dir))] == [0, 0]
        # Of an address that is said it is not known whose it is.
        assert check(server.address) == 1
        assert capsys.readouterr().err.startswith(f"unhealthy: PS331: {server.address} wants TLS")


def test_an_impossible_address_is_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("host:port") == 2
    assert "address 'host:port'" in capsys.readouterr().err


def test_with_tls_any_certificate_of_the_job_may_ask(
    shard: Server, certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard's container has the shard's alone."""
    shard.servicer.set("", SERVING)
    for name in ("coordinator", "worker", "operator", "reader"):
        (certs / f"{name}.key").unlink()
        (certs / f"{name}.crt").unlink()
    assert pserver.cli.__main__.run(["healthcheck", shard.address, "--certs", str(certs)]) == 0
    # Who answers has to be what is asked for.
    assert check(shard.address, "--certs", str(certs)) == 1
    assert "PS336" in capsys.readouterr().err
    # And no server is asked in plaintext.
    assert check(shard.address) == 1
    assert "PS331" in capsys.readouterr().err


def test_a_worker_is_asked_in_https_where_it_answers_in_that(certs: Path) -> None:
    security = Security.from_options(Role.WORKER, certs)
    with MetricsServer("0.0.0.0:0", list, security) as server:
        asked = ["healthcheck", server.address]
        assert worker.cli.__main__.run([*asked, "--certs", str(certs)]) == 0
        assert worker.cli.__main__.run(asked) == 1


def test_a_worker_is_healthy_that_answers_beside_its_metrics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(address: str) -> int:
        return worker.cli.__main__.run(["healthcheck", address])

    def collect() -> Iterator[GaugeMetricFamily]:
        raise AssertionError("health needs no figures")

    with MetricsServer("127.0.0.1:0", collect, Security(Role.WORKER)) as server:
        assert run(server.address) == 0
    with MetricsServer("127.0.0.1:0", collect, Security(Role.SHARD)) as other:
        assert run(other.address) == 1
    assert run(server.address) == 1
    assert run("nowhere") == 2
    said = capsys.readouterr().err
    assert f"unhealthy: {other.address} answers, and is no worker" in said
    assert "Connection refused" in said


def test_a_shard_that_waits_lives_and_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    """For the coordinator, say, or a checkpoint to be restored."""
    with ShardServer(0, "127.0.0.1:0") as waiting:
        ask = ["healthcheck", f"127.0.0.1:{waiting.port}"]
        assert pserver.cli.__main__.run(ask) == 0
        assert capsys.readouterr().err == ""
        assert pserver.cli.__main__.run([*ask, "--ready"]) == 1
        assert "psrpc.v1.ParameterServer" in (said := capsys.readouterr().err)
        assert said.endswith("is NOT_SERVING\n")
        engine: Any = SimpleNamespace(close=lambda: None)
        waiting.open(engine)
        assert pserver.cli.__main__.run([*ask, "--ready"]) == 0
        assert pserver.cli.__main__.run(ask) == 0
