"""Admission at the port for data connections."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from pserver.transport import data_listener
from pserver.transport.data_keys import SECRET_BYTES, TICKET_BYTES, data_keys
from pserver.transport.data_listener import MAX_STRANGERS, DataListener
from psrpc.core.errors import PortInUse, Unreachable
from tests.pserver.data_connections import connected, dialled, heard, opened

TLS_HELLO = bytes.fromhex("160301020001000001fc0303") + bytes(TICKET_BYTES)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is closed for having taken too long."""
    monkeypatch.setattr(data_listener, "STRANGER_S", 3600.0)


@contextmanager
def listening() -> Iterator[DataListener]:
    listener = DataListener("127.0.0.1", 0)
    listener.start()
    try:
        yield listener
    finally:
        listener.stop()


def test_a_ticket_may_come_in_pieces_and_is_answered() -> None:
    with opened() as (_, data, _client), dialled(data.port) as connection:
        keys = data_keys(data.secret)
        for byte in keys.ticket:
            connection.sendall(bytes([byte]))
        assert connection.recv(64, socket.MSG_WAITALL) == keys.proof


@pytest.mark.parametrize(
    "said", [bytes(TICKET_BYTES), b"GET / HTTP/1.1\r\nHost: shard.example.net\r\n\r\n", TLS_HELLO]
)
def test_a_connection_without_a_ticket_is_closed(said: bytes) -> None:
    with opened() as (_, data, _client):
        with dialled(data.port, said) as connection:
            assert heard(connection) == b""
        connected(data.port, data.secret).close()


def test_the_secret_itself_is_no_ticket() -> None:
    """The secret must not travel over a connection that others may read."""
    with (
        opened() as (_, data, _client),
        dialled(data.port, data.secret) as connection,
    ):
        assert heard(connection) == b""


def test_a_ticket_is_good_for_one() -> None:
    with listening() as listener:
        mine, _another = listener.expect(), listener.expect()
        ticket = data_keys(mine.secret).ticket
        with closing(connected(mine.port, mine.secret)), dialled(mine.port, ticket) as second:
            assert heard(second) == b""
        mine.forget()


def test_a_ticket_dies_with_its_call() -> None:
    with closing(socket.socket()) as late, listening() as listener:
        kept, gone = listener.expect(), listener.expect()
        gone.forget()
        late.connect(("127.0.0.1", listener.port))
        late.sendall(data_keys(gone.secret).ticket)
        assert heard(late) == b""
        assert kept.take("a worker") is None


def test_no_two_calls_are_given_the_same() -> None:
    with listening() as listener:
        assert len({listener.expect().secret for _ in range(100)}) == 100


def test_keys_derived_from_a_secret_all_differ() -> None:
    one, other = data_keys(bytes(SECRET_BYTES)), data_keys(secrets.token_bytes(SECRET_BYTES))
    made = [*vars(one).values(), *vars(other).values(), bytes(SECRET_BYTES)]
    assert len(set(made)) == len(made)
    assert {len(value) for value in made} == {32}
    assert one.of_worker == one.of_shard[::-1]


@pytest.mark.usefixtures("patient")
def test_without_an_outstanding_ticket_connections_are_closed_unread() -> None:
    with opened() as (session, data, client):
        with closing(connected(data.port, data.secret)), dialled(data.port) as second:
            assert heard(second) == b""
        session.close()
        assert client.get_status().version == 0


@pytest.mark.usefixtures("patient")
def test_silent_strangers_are_few_and_take_no_place_from_the_one_expected() -> None:
    with opened() as (_, data, _client), ExitStack() as stack:
        silent = [stack.enter_context(dialled(data.port)) for _ in range(MAX_STRANGERS + 1)]
        connected(data.port, data.secret).close()
        # Those that came first had to go.
        assert heard(silent[0]) == b""
        assert heard(silent[1]) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_a_silent_stranger_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_listener, "STRANGER_S", 0.0)
    with opened() as (_, data, _client), dialled(data.port) as connection:
        assert heard(connection) == b""


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
        asked = threads.submit(connected, port, bytes(SECRET_BYTES))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(32))
            with pytest.raises(Unreachable, match=f"port {port} .* is not the data port of the"):
                asked.result()
