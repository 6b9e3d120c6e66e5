"""Exchanges beside their call: who may connect, what the call still decides, and what happens when
the connection breaks."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import grpc
import numpy as np
import pytest

from coordinator.certs import make_certificates
from pserver import data_listener, wire
from pserver.client import Push, ShardClient
from pserver.data_connection import SECRET_BYTES, DataConnection, connect, proof
from pserver.data_listener import MAX_STRANGERS, DataListener
from pserver.server import ShardServer
from pserver.session import Session
from psrpc.channel import open_channel
from psrpc.errors import InvalidArgument, PortInUse, StaleGeneration, Unreachable
from psrpc.identity import Role
from psrpc.limits import MAX_MESSAGE_BYTES
from psrpc.retry import RetryPolicy
from psrpc.security import PLAINTEXT, Security
from psrpc.v1 import parameter_server_pb2 as pb
from tests.pserver.exchange_bench import BATCH, NAME, PLAN, normal
from tests.pserver.shards import (
    INCARNATION,
    ONE_TRY,
    counting,
    engine_of,
    part,
    served,
    whole,
)

PERSISTENT = RetryPolicy(first_s=0.001, budget_s=30)


def data_of(client: ShardClient) -> DataConnection | None:
    """The data connection of the client's session, if it has both."""
    found = client._exchanger._session
    return None if found is None else found._data


@contextmanager
def ready(retry: RetryPolicy = ONE_TRY) -> Iterator[ShardClient]:
    """A client of an initialized shard, with its data connection."""
    with served(engine_of(PLAN), retry, transport="data connection") as client:
        client.initialize(client.fence(1, 1), counting(PLAN))
        client.pull(client.fence(1, 1), "worker-1", None, whole(PLAN))
        assert data_of(client) is not None
        yield client


def values_of(client: ShardClient) -> np.ndarray:
    into = whole(PLAN)
    client.pull(client.fence(1, 1), "worker-1", None, into)
    return into[NAME]


# -- exchanges -------------------------------------------------------------------------------


def test_an_error_of_the_shard_comes_by_the_call_and_changes_nothing() -> None:
    with ready() as client:
        stale = client.fence(7, 1)
        with pytest.raises(StaleGeneration):
            client.push(stale, Push("worker-1", BATCH, 1, 0, part(PLAN, normal())))
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME])
        # The next has a call and a connection of its own.
        assert data_of(client) is not None


def test_a_worker_whose_connection_breaks_goes_on_within_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when something between them forgets it: nobody says why, and the call stands."""
    with ready(PERSISTENT) as client:
        broken, standing = data_of(client), client._exchanger._session
        assert broken is not None
        assert standing is not None
        # The shard hears of it, too, and its end of the call could be here first.
        monkeypatch.setattr(standing._ended, "wait", lambda _timeout: False)
        monkeypatch.setattr(Session, "usable", True)
        broken.hang_up()
        pushed = client.push(
            client.fence(1, 1), Push("worker-1", BATCH, 1, 0, part(PLAN, normal()))
        )
        assert pushed.outcome in ("applied", "already_applied")
        assert data_of(client) is None
        assert "the data connection with shard 0" in (client._exchanger._data_refusal or "")
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME] - normal()[NAME])


def test_where_nobody_can_connect_the_call_carries_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    expect = DataListener.expect

    def elsewhere(listener: DataListener) -> data_listener.Expected:
        expected = expect(listener)
        expected.port = nobody
        return expected

    monkeypatch.setattr(DataListener, "expect", elsewhere)
    with served(engine_of(PLAN), transport="data connection") as client:
        client.initialize(client.fence(1, 1), counting(PLAN))
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME])
        assert data_of(client) is None
        assert client._exchanger._data_refusal == (
            f"no data connection to port {nobody} of 127.0.0.1: Connection refused"
        )


# -- what a worker may send ------------------------------------------------------------------


@contextmanager
def opened(
    security: Security = PLAINTEXT, worker: Security = PLAINTEXT
) -> Iterator[tuple[Session, pb.DataOpened, ShardClient]]:
    """A call that has asked for a data connection, and another client of the same shard, which is
    initialized."""
    with ShardServer(0, "127.0.0.1:0", security=security, data_port=0) as server:
        server.open(engine_of(PLAN))
        address = f"127.0.0.1:{server.port}"
        with (
            ShardClient(address, INCARNATION, PLAN, 0, security=worker) as client,
            open_channel(address, worker) as channel,
        ):
            client.initialize(client.fence(1, 1), counting(PLAN))
            session = Session(channel, "the shard", 60)
            answer, _ = session.exchange(pb.ExchangeHeader(open_data=pb.OpenData()), ())
            yield session, answer.data, client
            session.close()


@contextmanager
def dialled(opened: pb.DataOpened, *said: bytes) -> Iterator[socket.socket]:
    """A connection by hand; ``said`` is sent as it is."""
    with socket.create_connection(("127.0.0.1", opened.port), 30) as connection:
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
def in_use() -> Iterator[tuple[Session, DataConnection, ShardClient]]:
    """A call whose exchanges are on a data connection, by hand."""
    with opened() as (session, data, client):
        connection = connect("127.0.0.1", data.port, data.secret, "the shard", 30, None)
        session.exchange(pb.ExchangeHeader(use_data=True), ())
        session.use_data(connection)
        yield session, connection, client


def pushing(client: ShardClient) -> pb.ExchangeHeader:
    gradient = part(PLAN, normal())
    push = Push("worker-1", BATCH, 1, 0, gradient)
    return pb.ExchangeHeader(push=client._push_header(client.fence(1, 1), push))


def test_a_secret_may_come_in_pieces_and_is_answered() -> None:
    with opened() as (_, data, _client), dialled(data) as connection:
        for byte in data.secret:
            connection.sendall(bytes([byte]))
        assert connection.recv(64, socket.MSG_WAITALL) == proof(data.secret)


@pytest.mark.parametrize(
    "said", [bytes(SECRET_BYTES), b"GET / HTTP/1.1\r\nHost: shard.example.net\r\n\r\n"]
)
def test_who_shows_another_secret_is_sent_away(said: bytes) -> None:
    with opened() as (_, data, _client):
        with dialled(data, said) as connection:
            assert heard(connection) == b""
        connect("127.0.0.1", data.port, data.secret, "the shard", 30, None).close()


def test_a_secret_is_good_for_one() -> None:
    listener = DataListener("127.0.0.1", 0)
    listener.start()
    with _stopping(listener):
        mine, _another = listener.expect(), listener.expect()
        first = connect("127.0.0.1", mine.port, mine.secret, "the shard", 30, None)
        again = pb.DataOpened(port=mine.port)
        with closing(first), dialled(again, mine.secret) as second:
            assert heard(second) == b""
        mine.forget()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is sent away for having taken too long."""
    monkeypatch.setattr(data_listener, "STRANGER_S", 3600.0)


def test_a_call_that_ends_hangs_up() -> None:
    with opened() as (session, data, client):
        connection = connect("127.0.0.1", data.port, data.secret, "the shard", 30, None)
        with closing(connection):
            session.exchange(pb.ExchangeHeader(use_data=True), ())
            gradient = wire.gradient_parts(PLAN, part(PLAN, normal()))
            connection.send(pushing(client).SerializeToString(), [data for _, data in gradient])
            assert connection.receive_message()
            # As its deadline would: this side of the connection is not told.
            session._call.cancel()
            connection._socket.settimeout(30)
            assert connection.receive_message() is None


@pytest.mark.usefixtures("patient")
def test_while_nobody_is_expected_nobody_is_heard() -> None:
    with opened() as (session, data, client):
        first = connect("127.0.0.1", data.port, data.secret, "the shard", 30, None)
        with closing(first), dialled(data) as second:
            assert heard(second) == b""
        session.close()
        assert client.get_status().version == 0


def test_a_secret_dies_with_its_call() -> None:
    listener = DataListener("127.0.0.1", 0)
    listener.start()
    with closing(socket.socket()) as late, _stopping(listener):
        kept, gone = listener.expect(), listener.expect()
        gone.forget()
        late.connect(("127.0.0.1", listener.port))
        late.sendall(gone.secret)
        assert heard(late) == b""
        assert kept.take("a worker") is None


@pytest.mark.usefixtures("patient")
def test_silent_strangers_are_few_and_take_no_place_from_the_one_expected() -> None:
    with opened() as (_, data, _client), ExitStack() as stack:
        silent = [stack.enter_context(dialled(data)) for _ in range(MAX_STRANGERS + 1)]
        connection = connect("127.0.0.1", data.port, data.secret, "the shard", 30, None)
        connection.close()
        # Those that came first had to go.
        assert heard(silent[0]) == b""
        assert heard(silent[1]) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_a_stranger_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_listener, "STRANGER_S", 0.0)
    with opened() as (_, data, _client), dialled(data) as connection:
        assert heard(connection) == b""


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (pb.ExchangeHeader(use_data=True), "has no data connection; open one first"),
        (pb.ExchangeHeader(open_data=pb.OpenData()), "expects a data connection already"),
    ],
)
def test_a_call_opens_one_data_connection(header: pb.ExchangeHeader, words: str) -> None:
    with opened() as (session, _, _client), pytest.raises(grpc.RpcError) as caught:
        session.exchange(header, ())
    assert words in str(caught.value.details())


def test_a_shard_may_take_none() -> None:
    with served(engine_of(PLAN)) as client:
        client.initialize(client.fence(1, 1), counting(PLAN))
        values_of(client)
        refusal = client._exchanger._data_refusal
    assert refusal == "the shard was told to take none (--data-connections off)"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), "announces a message of 8388609 bytes"),
        ((5).to_bytes(4, "little") + b"\xff\xff\xff\xff\xff", "cannot be read as ExchangeHeader"),
        ((0).to_bytes(4, "little"), "an exchange asks for nothing"),
    ],
)
def test_what_is_no_message_ends_the_call(said: bytes, words: str) -> None:
    with in_use() as (session, connection, client):
        connection._socket.sendall(said)
        assert connection.receive_message() is None
        reason = session.reason(Unreachable("nothing"))
        assert isinstance(reason, InvalidArgument)
        assert words in str(reason)
        assert client.get_status().version == 0


def test_a_push_that_is_cut_short_changes_nothing() -> None:
    with in_use() as (session, connection, client):
        header = pushing(client)
        parts = wire.gradient_parts(PLAN, part(PLAN, normal()))
        connection.send(header.SerializeToString(), [parts[0][1][:-4]])
        connection.hang_up()
        assert session._ended.wait(30)
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME])
        # Whole, it is new to the shard, and there is a buffer for it.
        pushed = Push("worker-1", BATCH, 1, 0, part(PLAN, normal()))
        assert client.push(client.fence(1, 1), pushed).outcome == "applied"


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


def test_with_certificates_it_is_encrypted(certs: Path) -> None:
    shard = Security.from_options(Role.SHARD, certs)
    worker = Security.from_options(Role.WORKER, certs)
    with opened(shard, worker) as (session, data, client):
        with dialled(data, data.secret) as plaintext:
            assert proof(data.secret) not in heard(plaintext)
        tls = worker.data_client(Role.SHARD)
        connection = connect("127.0.0.1", data.port, data.secret, "the shard", 30, tls)
        assert isinstance(connection._socket, ssl.SSLSocket)
        session.exchange(pb.ExchangeHeader(use_data=True), ())
        session.use_data(connection)
        header = pushing(client)
        answer, _ = session.exchange(header, wire.gradient_parts(PLAN, part(PLAN, normal())))
        assert answer.push.version == 1
        np.testing.assert_array_equal(values_of(client), counting(PLAN)[NAME] - normal()[NAME])


@pytest.mark.parametrize("wrong", ["no certificate", "another authority", "not a shard"])
def test_who_cannot_be_believed_gets_no_data(certs: Path, wrong: str, tmp_path: Path) -> None:
    shard = Security.from_options(Role.SHARD, certs)
    worker = Security.from_options(Role.WORKER, certs)
    with opened(shard, worker) as (_, data, client):
        mine = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        mine.load_verify_locations(certs / "ca.crt")
        name = "shard.tiny.pserver"
        if wrong == "another authority":
            make_certificates(tmp_path / "ca", "tiny", datetime.now(UTC))
            mine.load_cert_chain(tmp_path / "ca/worker.crt", tmp_path / "ca/worker.key")
        if wrong == "not a shard":
            mine.load_cert_chain(certs / "worker.crt", certs / "worker.key")
            name = "coordinator.tiny.pserver"
        with pytest.raises(Unreachable):
            connect("127.0.0.1", data.port, data.secret, "the shard", 30, (mine, name))
        assert client.get_status().version == 0


def test_a_client_by_token_needs_no_certificate_for_its_data(certs: Path, tmp_path: Path) -> None:
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
        assert data_of(client) is not None


# -- the port --------------------------------------------------------------------------------


@contextmanager
def _stopping(listener: DataListener) -> Iterator[None]:
    try:
        yield
    finally:
        listener.stop()


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listener = DataListener("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            PortInUse, match="Address already in use; choose another --data-connections"
        ):
            listener.start()


def test_another_program_at_the_port_is_not_the_shard() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(1) as threads,
    ):
        port = listener.getsockname()[1]
        asked = threads.submit(connect, "127.0.0.1", port, bytes(32), "the shard", 30, None)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(32))
            with pytest.raises(Unreachable, match=f"port {port} .* is not the data port of the"):
                asked.result()
