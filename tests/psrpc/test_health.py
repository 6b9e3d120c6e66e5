from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from psrpc.channel import bind, make_server
from psrpc.health import main

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Server:
    address: str
    servicer: health.HealthServicer


@pytest.fixture
def server() -> Iterator[Server]:
    servicer = health.HealthServicer()
    running = make_server(threads=2)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    port = bind(running, "127.0.0.1:0")
    running.start()
    yield Server(f"127.0.0.1:{port}", servicer)
    running.stop(grace=None).wait()


def test_serving_is_zero(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.servicer.set("", SERVING)
    assert main([server.address]) == 0
    assert capsys.readouterr() == ("", "")


def test_not_serving_is_one(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.servicer.set("psrpc.v1.Coordinator", NOT_SERVING)
    assert main([server.address, "--service", "psrpc.v1.Coordinator"]) == 1
    expected = f"unhealthy: psrpc.v1.Coordinator at {server.address} is NOT_SERVING\n"
    assert capsys.readouterr().err == expected


def test_an_unknown_service_is_one(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([server.address, "--service", "nobody"]) == 1
    assert capsys.readouterr().err == f"unhealthy: {server.address} does not know nobody\n"


def test_silence_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    # Accepts connections and never says a word.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main([address, "--timeout", "0.05"]) == 1
    assert capsys.readouterr().err == f"unhealthy: {address} did not answer within 0.05 s\n"


def test_an_impossible_address_is_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host:port"]) == 2
    assert capsys.readouterr().err.startswith("error: address 'host:port'")
