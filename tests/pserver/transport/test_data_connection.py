"""Exchanges beside their call: what the call still decides, what others can read, and what happens
when the connection breaks."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from coordinator.certificates.authority import make_certificates
from pserver.client.client import ShardClient
from pserver.transport import data_listener
from pserver.transport.byte_stream import SealedStream
from pserver.transport.data_connection import DataConnection, within_host
from pserver.transport.data_keys import data_keys
from pserver.transport.data_listener import DataListener
from pserver.transport.data_transport import WorkerData
from pserver.transport.grpc_stream import StandingCall
from pserver.transport.transport import Outgoing, TransportChoice
from pserver.wire import streams
from psrpc.core.errors import InvalidArgument, StaleGeneration, Unreachable
from psrpc.net.limits import MAX_MESSAGE_BYTES
from psrpc.ops.retry import RetryPolicy
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role
from psrpc.v1 import parameter_server_pb2 as pb
from psrpc.v1 import types_pb2 as types
from tests.pserver.data_connections import connected, dialled, heard, in_use, opened, pushing, used
from tests.pserver.exchanges import BATCH, NAME, PLAN, normal
from tests.pserver.shards import (
    INITIAL,
    ONE_TRY,
    counting,
    engine_of,
    fence_of,
    leased,
    part,
    served,
    whole,
)

PERSISTENT = RetryPolicy(first_s=0.001, budget_s=30)


def data_of(client: ShardClient) -> DataConnection | None:
    """The data connection of the client's call, if it has both."""
    found = client._exchanger._transport
    return found._connection if isinstance(found, WorkerData) else None


@contextmanager
def ready(retry: RetryPolicy = ONE_TRY, *, falls_back: bool = False) -> Iterator[ShardClient]:
    """A client of an initialized shard, with its data connection."""
    with served(
        engine_of(PLAN), retry, transport="data connection", falls_back=falls_back
    ) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        client.pull(fence_of(client), None, whole(PLAN))
        assert data_of(client) is not None
        assert client.transport == TransportChoice("data connection")
        yield client


def values_of(client: ShardClient) -> np.ndarray:
    into = whole(PLAN)
    client.pull(fence_of(client), None, into)
    return into[NAME]


# -- exchanges -------------------------------------------------------------------------------


def test_an_error_of_the_shard_comes_by_the_call_and_changes_nothing() -> None:
    with ready() as client:
        stale = fence_of(client, 7)
        with pytest.raises(StaleGeneration):
            client.push(stale, leased("worker-1", BATCH, 1, 0, part(PLAN, normal())))
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME])
        # The next has a call and a connection of its own.
        assert data_of(client) is not None


def test_a_worker_whose_connection_breaks_goes_on_within_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a device between them forgets it: no error comes, and the call stands."""
    with ready(PERSISTENT, falls_back=True) as client:
        broken, standing = data_of(client), client._exchanger._transport
        assert broken is not None
        assert isinstance(standing, WorkerData)
        # The shard hears of it, too, and its end of the call could be here first.
        monkeypatch.setattr(standing._ended, "wait", lambda _timeout: False)
        monkeypatch.setattr(StandingCall, "usable", True)
        broken.hang_up()
        pushed = client.push(
            fence_of(client), leased("worker-1", BATCH, 1, 0, part(PLAN, normal()))
        )
        assert pushed.outcome in ("applied", "already_applied")
        assert data_of(client) is None
        assert (now := client.transport) is not None
        assert now.kind == "calls"
        assert "the data connection with shard 0" in now.why
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME] - normal()[NAME])


def test_without_a_data_connection_the_call_carries_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        unused = closed.getsockname()[1]
    expect = DataListener.expect

    def elsewhere(listener: DataListener) -> data_listener.Expected:
        expected = expect(listener)
        expected.port = unused
        return expected

    monkeypatch.setattr(DataListener, "expect", elsewhere)
    with served(engine_of(PLAN), transport="data connection", falls_back=True) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME])
        assert data_of(client) is None
        assert client.transport == TransportChoice(
            "calls", f"no data connection to port {unused} of 127.0.0.1: Connection refused"
        )


# -- what a worker may send ------------------------------------------------------------------


def test_a_call_that_ends_hangs_up() -> None:
    with opened() as (session, data, client):
        connection = connected(data.port, data.secret)
        with closing(connection):
            session.ask(pb.ExchangeHeader(use_data=True))
            gradient = streams.gradient_parts(PLAN, part(PLAN, normal()))
            connection.send(pushing(client).SerializeToString(), [data for _, data in gradient])
            assert connection.receive_message()
            # As its deadline would: this side of the connection is not told.
            session._call.cancel()
            connection._socket.settimeout(30)
            assert connection.receive_message() is None


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (pb.ExchangeHeader(use_data=True), "has no data connection; open one first"),
        (pb.ExchangeHeader(open_data=pb.OpenData()), "expects a data connection already"),
    ],
)
def test_a_call_opens_one_data_connection(header: pb.ExchangeHeader, words: str) -> None:
    with opened() as (call, _, _client), pytest.raises(InvalidArgument, match=words):
        call.ask(header)


def test_a_shard_may_take_none() -> None:
    with served(engine_of(PLAN)) as client:
        client.initialize(fence_of(client), counting(PLAN), INITIAL)
        values_of(client)
        found = client.transport
    assert found == TransportChoice("calls", "the shard takes none (--data-connections off)")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), "announces a message of 8388609 bytes"),
        ((5).to_bytes(4, "little") + b"\xff\xff\xff\xff\xff", "cannot be read as ExchangeHeader"),
        ((0).to_bytes(4, "little"), "an exchange asks for nothing"),
    ],
)
def test_malformed_messages_end_the_call(said: bytes, words: str) -> None:
    with in_use() as (session, connection, client):
        connection._socket.sendall(said)
        assert connection.receive_message() is None
        reason = session.failed(Unreachable("nothing"))
        assert isinstance(reason, InvalidArgument)
        assert words in str(reason)
        assert client.get_status().version == 0


def test_a_push_that_is_cut_short_changes_nothing() -> None:
    with in_use() as (session, connection, client):
        header = pushing(client)
        parts = streams.gradient_parts(PLAN, part(PLAN, normal()))
        connection.send(header.SerializeToString(), [parts[0][1][:-4]])
        connection.hang_up()
        assert session._ended.wait(30)
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME])
        # Whole, it is new to the shard, and there is a buffer for it.
        pushed = leased("worker-1", BATCH, 1, 0, part(PLAN, normal()))
        assert client.push(fence_of(client), pushed).outcome == "applied"


def test_a_worker_that_dies_ends_its_call() -> None:
    with in_use() as (session, connection, _):
        connection.close()
        assert session._ended.wait(30)
        with pytest.raises(Unreachable):
            connection.send(b"", ())


# -- certificates ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "tiny"
    make_certificates(directory, "tiny", datetime.now(UTC))
    return directory


@contextmanager
def led(port: int) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    """A port that leads to another, and all that has gone there and back: of one connection."""
    there: list[bytes] = []
    back: list[bytes] = []

    def lead(source: socket.socket, target: socket.socket, seen: list[bytes]) -> None:
        with suppress(OSError):
            while more := source.recv(1 << 16):
                seen.append(more)
                target.sendall(more)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        near, _ = listener.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            other = threads.submit(lead, near, far, there)
            lead(far, near, back)
            other.result()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:
        threads.submit(accept)
        yield listener.getsockname()[1], there, back


@pytest.mark.parametrize("encrypted", [True, False])
def test_with_certificates_nothing_on_the_wire_can_be_read(certs: Path, encrypted: bool) -> None:
    shard = Security.from_options(Role.SHARD, certs) if encrypted else PLAINTEXT
    worker = Security.from_options(Role.WORKER, certs) if encrypted else PLAINTEXT
    with opened(shard, worker) as (session, data, client), led(data.port) as (port, there, back):
        end = used(session, connected(port, data.secret, sealed=worker.encrypted))
        gradient = part(PLAN, normal())
        header = pushing(client)
        header.pull.newest = True
        header.pull.encoding = types.ENCODING_PLAIN
        answer, arrival = end.exchange(header, Outgoing(gradient), lambda: None)
        into = whole(PLAN)
        arrival.receive(PLAN, streams.from_extents(answer.pull.extents), into)
        expected = counting(PLAN)[NAME] - normal()[NAME]
        np.testing.assert_array_equal(into[NAME], expected)
        end.close()
        session.close()
        sent, came = b"".join(there), b"".join(back)
        for secret, wires in (
            (data.secret, sent + came),
            (normal()[NAME].tobytes()[:16], sent),
            (b"worker-1", sent),
            (expected.tobytes()[:16], came),
        ):
            # Without certificates the same bytes are found: the test looks where they are.
            assert (secret in wires) is (not encrypted and secret != data.secret)


def test_a_worker_with_certificates_has_its_data_sealed(certs: Path) -> None:
    shard = Security.from_options(Role.SHARD, certs)
    worker = Security.from_options(Role.WORKER, certs)
    with opened(shard, worker) as (_, _data, client):
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME])
        connection = data_of(client)
        assert connection is not None
        assert isinstance(connection._stream, SealedStream)


def test_a_peer_with_the_ticket_but_not_the_secret_is_refused(certs: Path) -> None:
    shard = Security.from_options(Role.SHARD, certs)
    worker = Security.from_options(Role.WORKER, certs)
    with opened(shard, worker) as (session, data, client):
        with dialled(data.port, data_keys(data.secret).ticket) as thief:
            # Only then the shard has the connection.
            assert thief.recv(32, socket.MSG_WAITALL) == data_keys(data.secret).proof
            session.ask(pb.ExchangeHeader(use_data=True))
            message = pushing(client).SerializeToString()
            thief.sendall(len(message).to_bytes(4, "little") + message + bytes(1 << 12))
            assert heard(thief) == b""
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME])


def test_a_client_by_token_has_its_data_sealed_too(certs: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef0123456789abcdef")
    authority = tmp_path / "authority"
    authority.mkdir()
    shutil.copy(certs / "ca.crt", authority)
    shard = Security.from_options(Role.SHARD, certs, token)
    worker = Security.from_options(Role.WORKER, authority, token)
    with opened(shard, worker) as (_, _data, client):
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME])
        connection = data_of(client)
        assert connection is not None
        assert isinstance(connection._stream, SealedStream)


# -- within a host ---------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="the system has no such choice")
def test_within_a_host_nothing_keeps_a_pace() -> None:
    def control(of: socket.socket) -> bytes:
        return of.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with suppress(OSError):
        # So that it is another one in any case.
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    with far, closing(DataConnection(near, "the shard")):
        assert control(near) == b"reno"


def test_detection_of_connections_within_a_host() -> None:
    class Elsewhere(socket.socket):
        def getpeername(self) -> tuple[str, int]:
            return ("192.0.2.1", 7000)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with far, Elsewhere(fileno=near.detach()) as elsewhere:
        assert within_host(far)
        assert not within_host(elsewhere)
    # It is nowhere any more.
    assert not within_host(far)
