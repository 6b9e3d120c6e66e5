"""Servers that clients do not believe, and certificates that are replaced."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from coordinator.certificates.authority import make_certificates, renew_certificates
from pserver.server.server import ShardServer
from psrpc.core.errors import InvalidArgument
from psrpc.net.channel import bind, make_server, open_channel
from psrpc.net.health import why_unhealthy
from psrpc.security.credentials import Security
from psrpc.security.identity import Role
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.wire.interceptor import ErrorInterceptor
from tests.pserver.shards import engine_of
from tests.security.forgery import forge
from tests.security.rpcs import PLAN
from tests.security.test_certificates import NOW, put

STATUS = "/psrpc.v1.ParameterServer/GetStatus"


@contextmanager
def shard_of(security: Security) -> Iterator[str]:
    with ShardServer(0, "127.0.0.1:0", security=security) as server:
        server.open(engine_of(PLAN))
        yield f"127.0.0.1:{server.port}"


def status(channel: grpc.Channel, **options: Any) -> grpc.StatusCode:
    """Asks a shard for its status; returns the outcome."""
    call = channel.unary_unary(
        STATUS, pb.GetStatusRequest.SerializeToString, pb.GetStatusResponse.FromString
    )
    try:
        call(pb.GetStatusRequest(), timeout=20, **options)
    except grpc.RpcError as error:
        found: grpc.StatusCode = error.code()
        return found
    return grpc.StatusCode.OK


# -- servers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("pserver://tiny/worker", ""),
        ("pserver://tiny/coordinator", "coordinator.tiny.pserver"),
        ("pserver://huge/shard", "shard.huge.pserver"),
    ],
)
def test_only_shards_of_the_job_can_serve_as_one(
    certs: Path, mine: Path, names: tuple[str, str]
) -> None:
    """The authority is the right one; the server hands its certificate out as it is."""
    key, certificate = forge(certs, names[0], dns=names[1])
    credentials = grpc.ssl_server_credentials([(key, certificate)], (certs / "ca.crt").read_bytes())
    server = make_server(1, [ErrorInterceptor()])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        worker = Security.from_options(Role.WORKER, certs)
        with open_channel(f"127.0.0.1:{port}", worker, Role.SHARD) as channel:
            assert status(channel) == grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop(0).wait()


def test_any_certificate_of_the_job_may_ask_for_a_servers_health(certs: Path) -> None:
    with shard_of(Security.from_options(Role.SHARD, certs)) as address:
        for role in Role:
            security = Security.from_options(role, certs)
            assert not why_unhealthy(address, "", 20, security, Role.SHARD)


@pytest.mark.parametrize("address", ["192.0.2.1:5000", "0.0.0.0:0", "[::]:0", "example.org:1"])
def test_plaintext_stays_on_this_machine(address: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--certs DIR .* or --insecure"):
        bind(make_server(1), address)
    if not address.startswith(("0", "[")):
        with pytest.raises(InvalidArgument, match="to send anything to"):
            open_channel(address)
        open_channel(address, Security(insecure=True)).close()


# -- replacing -------------------------------------------------------------------------------


def test_all_certificates_are_replaced_while_a_shard_runs(mine: Path, tmp_path: Path) -> None:
    """The authority too: nothing of what the processes began with is good for anything after it."""
    security = Security.from_options(Role.SHARD, mine)
    worker = Security.from_options(Role.WORKER, mine)
    before = Security.from_options(Role.WORKER, shutil.copytree(mine, tmp_path / "before"))
    make_certificates(tmp_path / "new", "tiny", NOW)
    with shard_of(security) as address, open_channel(address, worker) as channel:
        assert status(channel) == grpc.StatusCode.OK
        shutil.copytree(tmp_path / "new", mine, dirs_exist_ok=True)
        assert status(channel) == grpc.StatusCode.OK
        with open_channel(address, before) as late:
            assert status(late) == grpc.StatusCode.UNAVAILABLE


def test_calls_that_are_under_way_go_on(mine: Path) -> None:
    worker = Security.from_options(Role.WORKER, mine)
    with (
        shard_of(Security.from_options(Role.SHARD, mine)) as address,
        open_channel(address, worker) as channel,
    ):
        untyped: Any = channel
        more: SimpleQueue[bytes | None] = SimpleQueue()
        push = untyped.stream_unary("/psrpc.v1.ParameterServer/PushGradients").future(
            iter(more.get, None), timeout=20
        )
        # It came before this one, which is of the same connection.
        assert status(channel) == grpc.StatusCode.OK
        renew_certificates(mine, NOW)
        assert status(channel) == grpc.StatusCode.OK
        assert not push.done()
        more.put(None)
        assert push.code() == grpc.StatusCode.INVALID_ARGUMENT, "it is the shard that ends it"


def test_half_of_them_do_no_harm(mine: Path, certs: Path) -> None:
    """A key without its certificate is not used; both together are."""
    worker = Security.from_options(Role.WORKER, mine)
    key, certificate = forge(certs, "pserver://tiny/worker")
    with (
        shard_of(Security.from_options(Role.SHARD, certs)) as address,
        open_channel(address, worker) as channel,
    ):
        (mine / "worker.key").write_bytes(key)
        assert status(channel) == grpc.StatusCode.OK
        put(mine, Role.WORKER, key, certificate)
        assert status(channel) == grpc.StatusCode.OK
        put(mine, Role.WORKER, *forge(certs, "pserver://tiny/reader"))
        assert status(channel) == grpc.StatusCode.OK, "not its own: the last good ones stay"
