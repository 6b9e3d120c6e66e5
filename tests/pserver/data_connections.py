"""Data connections to test, by hand and as a worker has them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from pserver.client.client import ShardClient
from pserver.server.server import ShardServer
from pserver.transport.data_connection import DataConnection, connect
from pserver.transport.data_transport import DataConnector, WorkerData
from pserver.transport.grpc_stream import StandingCall
from psrpc.net.channel import open_channel
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.v1 import parameter_server_pb2 as pb
from tests.pserver.exchanges import BATCH, PLAN, normal
from tests.pserver.shards import INCARNATION, INITIAL, counting, engine_of, fence_of, leased, part


@contextmanager
def opened(
    security: Security = PLAINTEXT, worker: Security = PLAINTEXT
) -> Iterator[tuple[StandingCall, pb.DataOpened, ShardClient]]:
    """A call that has asked for a data connection, and another client of the same shard, which is
    initialized."""
    with ShardServer(0, "127.0.0.1:0", security=security, data_port=0) as server:
        server.open(engine_of(PLAN))
        address = f"127.0.0.1:{server.port}"
        with (
            ShardClient(address, INCARNATION, PLAN, 0, security=worker) as client,
            open_channel(address, worker) as channel,
        ):
            client.initialize(fence_of(client), counting(PLAN), INITIAL)
            call = StandingCall(channel, "the shard", 60)
            yield call, call.ask(pb.ExchangeHeader(open_data=pb.OpenData())).data, client
            call.close()


def connected(port: int, secret: bytes, *, sealed: bool = False) -> DataConnection:
    """As a worker does it."""
    return connect("127.0.0.1", port, secret, "the shard", 30, sealed=sealed)


@contextmanager
def dialled(port: int, *said: bytes) -> Iterator[socket.socket]:
    """A connection by hand; ``said`` is sent as it is."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        for piece in said:
            connection.sendall(piece)
        yield connection


def heard(connection: socket.socket) -> bytes:
    """All that comes before the other side ends the connection."""
    found = b""
    try:
        while more := connection.recv(4096):
            found += more
    except ConnectionResetError:
        pass
    return found


@contextmanager
def in_use(
    security: Security = PLAINTEXT, worker: Security = PLAINTEXT
) -> Iterator[tuple[WorkerData, DataConnection, ShardClient]]:
    """A call whose exchanges are on a data connection, by hand."""
    with opened(security, worker) as (call, data, client):
        connection = connected(data.port, data.secret, sealed=worker.encrypted)
        end = used(call, connection)
        yield end, connection, client
        end.close()


def used(call: StandingCall, connection: DataConnection) -> WorkerData:
    """The worker's end of a connection that has been opened for ``call``."""
    call.ask(pb.ExchangeHeader(use_data=True))
    connector = DataConnector("127.0.0.1:1", "the shard", PLAN, 30, sealed=False)
    return WorkerData(call, connection, PLAN, connector)


def pushing(client: ShardClient) -> pb.ExchangeHeader:
    """The header of a push."""
    gradient = part(PLAN, normal())
    push = leased("worker-1", BATCH, 1, 0, gradient)
    header = pb.ExchangeHeader()
    client._requests.fill_push(header.push, fence_of(client), push)
    return header
