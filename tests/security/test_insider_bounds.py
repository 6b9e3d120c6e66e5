"""Bounds of what a member sends, and of what it leaves half done.

Jobs go on meanwhile, and end with each batch counted once.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.core import GaugeMetricFamily

from pserver.core.assembly import shard_extents
from pserver.wire import messages as wire
from pserver.wire import streams
from psrpc import SOFTWARE
from psrpc.core.encoding import plain
from psrpc.core.errors import InvalidArgument, PsError
from psrpc.metrics.exporter import Family, MetricsServer
from psrpc.net.channel import open_channel
from psrpc.security.credentials import Security
from psrpc.security.identity import Role, server_name
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import parameter_server_pb2 as shard_pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.codec import encode_stream
from psrpc.wire.commands import from_batch
from psrpc.wire.status import error_from_rpc
from tests.chaos.witness import WITNESS
from tests.security.conftest import JOB
from tests.security.insider import WAIT_S, Cluster, Insider, cluster, refusal

pytestmark = pytest.mark.slow

HUGE = 3_000_000
"""Characters of a name: a request of the size passes gRPC's bound of a message."""

MOST_STATUS = 100_000
"""Bytes of the status of a job that a member has tried to fill."""


def test_names_of_megabytes_are_refused(certs: Path, tmp_path: Path) -> None:
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        insider.join()
        huge = "x" * HUGE
        claims: list[dict[str, Any]] = [
            {name: huge} for name in ("host", "device", "settings_sha256", "job_sha256", "software")
        ]
        for number, claim in enumerate(claims):
            known: dict[str, Any] = {
                "incarnation": 1000 + number,
                "job_sha256": job.run.description.job_sha256,
                "software": SOFTWARE,
                "secret": number.to_bytes(32, "big"),
            }
            request = pb.RegisterWorkerRequest(**(known | claim))
            error = refusal(partial(insider.client.register_worker, request))
            assert isinstance(error, PsError), claim.keys()
            assert len(str(error)) < 1000
        for token in (huge.encode(), insider.session + huge.encode()):
            lease = pb.LeaseWorkRequest(session=token, generation=insider.generation)
            assert refusal(partial(insider.client.lease_work, lease)) is not None
        beat = pb.HeartbeatWorkerRequest(session=insider.session, waiting_for=huge)
        refusal(lambda: insider.client.heartbeat_worker(beat))
        assert job.status().ByteSize() < MOST_STATUS
        insider.leave()
        job.finish()


def test_pushes_that_stop_half_way_do_not_keep_others_from_training(
    certs: Path, tmp_path: Path
) -> None:
    """As many as one connection may have, of an attempt that is leased to it."""
    with cluster(certs, tmp_path) as job, Insider(job) as insider, ExitStack() as calls:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        over = threading.Event()
        calls.callback(over.set)
        for shard in range(2):
            address = job.served.job_run.members.places.shards[shard].address
            channel: Any = calls.enter_context(open_channel(address, insider.security, Role.SHARD))
            push = channel.stream_unary(f"/{wire.SERVICE}/PushGradients")
            for _ in range(32):
                call = push.future(half_of_a_push(insider, attempt, shard, over), timeout=WAIT_S)
                calls.callback(call.cancel)
        insider.leave()
        job.finish()


def half_of_a_push(
    insider: Insider, attempt: types.Attempt, shard: int, over: threading.Event
) -> Iterator[bytes]:
    """The header and a few bytes, and then nothing until it is ``over``."""
    batch = from_batch(attempt.batch)
    gradient = insider.gradient(batch, shard)
    header = shard_pb.PushHeader(
        fence=insider.fence(shard),
        batch=attempt.batch,
        attempt=attempt.attempt,
        examples=batch.count,
        grant=attempt.grant,
        extents=streams.to_extents(streams.gradient_extents(insider.plan, gradient)),
    )
    yield shard_pb.PushGradientsRequest(header=header).SerializeToString()
    some = types.Chunk(arena=0, offset=0, data=bytes(4))
    yield shard_pb.PushGradientsRequest(chunk=some).SerializeToString()
    over.wait()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_that_are_not_finite_change_nothing(
    certs: Path, tmp_path: Path, value: float
) -> None:
    """From a client that does not look at them before it pushes."""
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        job.train_to(8)
        attempt = insider.join().lease().train.batches[0]
        insider.gradient_of = lambda array: plain(np.full_like(array, value))
        for shard in range(2):
            error = refusal(partial(insider.push, attempt, shard))
            assert isinstance(error, InvalidArgument), error
        assert np.isfinite(insider.pull(None)[WITNESS]).all()
        insider.leave()
        job.finish()


@pytest.mark.parametrize("path", ["/etc", "../..", "checkpoints/../../x", "\0", "s3://bucket/x"])
def test_an_initializer_names_no_place_that_shards_read(
    certs: Path, tmp_path: Path, path: str
) -> None:
    """Even one that was told to initialize: where first rows come from is the coordinator's to say.
    Its field had number 3."""
    with cluster(certs, tmp_path) as job, Insider(job) as insider:
        grant = insider.join().lease().initialize.grant
        for shard in range(2):
            answer = initialize(job, insider, shard, grant, path)
            # Either it is refused as a place, or there is no such field any more.
            assert answer is None or isinstance(answer, InvalidArgument), answer
        insider.leave()
        job.start_worker()
        job.finish()


def initialize(
    job: Cluster, insider: Insider, shard: int, grant: bytes, path: str
) -> PsError | None:
    """Initializes a shard with the right values, and names a place for rows."""
    values = {
        arena.name: plain(np.zeros(arena.shard_length(shard), arena.dtype))
        for arena in insider.plan.arenas
    }
    extents = streams.to_extents(shard_extents(insider.plan, shard))
    header = shard_pb.InitializeHeader(fence=insider.fence(shard), extents=extents, grant=grant)
    named = path.encode()
    # Field 3, of bytes, behind all others: protobuf takes fields in any order.
    header.MergeFromString(header.SerializeToString() + bytes([26, len(named)]) + named)
    address = job.served.job_run.members.places.shards[shard].address
    with open_channel(address, insider.security, Role.SHARD) as channel:
        untyped: Any = channel
        call = untyped.stream_unary(f"/{wire.SERVICE}/Initialize")
        try:
            call(
                encode_stream(header, streams.gradient_parts(insider.plan, values)), timeout=WAIT_S
            )
        except grpc.RpcError as error:
            return error_from_rpc(error, f"shard {shard}")
    return None


def test_eight_slow_clients_of_metrics_keep_no_reader_waiting(certs: Path) -> None:
    """They connect and say nothing, or half of a request."""
    security = Security.from_options(Role.COORDINATOR, certs)
    with MetricsServer("0.0.0.0:0", families, security) as server, ExitStack() as slow:
        port = int(server.address.rpartition(":")[2])
        for number in range(8):
            connection = slow.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(b"" if number % 2 else b"\x16\x03\x01")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(certs / "ca.crt")
        context.load_cert_chain(certs / "reader.crt", certs / "reader.key")
        name = server_name(JOB, Role.COORDINATOR)
        # Less than what the server gives a connection for its handshake.
        connection = slow.enter_context(socket.create_connection(("127.0.0.1", port), 3.0))
        with context.wrap_socket(connection, server_hostname=name) as reader:
            reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            found = b""
            while more := reader.recv(1 << 16):
                found += more
    assert b"pserver_version 7.0" in found


def families() -> Iterator[Family]:
    """One figure."""
    yield GaugeMetricFamily("pserver_version", "Updates.", value=7)
