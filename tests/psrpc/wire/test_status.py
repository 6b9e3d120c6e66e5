"""One error tree, one table, and the same class at both ends of a real connection."""

from __future__ import annotations

import inspect
import re
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from psrpc.core import errors
from psrpc.core.errors import (
    InvalidArgument,
    NotConnected,
    PortInUse,
    PsError,
    StaleGeneration,
    error_line,
)
from psrpc.net.channel import (
    bind,
    make_aio_server,
    make_server,
    open_channel,
    parse_address,
)
from psrpc.net.limits import MAX_MESSAGE_BYTES
from psrpc.security.credentials import Security
from psrpc.wire.interceptor import AioErrorInterceptor, ErrorInterceptor
from psrpc.wire.status import CODES, LONGEST_DETAILS, error_from_rpc

TREE = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PsError)]


def test_every_error_has_a_status() -> None:
    assert set(CODES) == set(TREE)


class Raising(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Raises the error whose class name is asked for, at once or in the middle of a stream."""

    def service(self, call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        if call_details.method == "/t/Stream":
            return grpc.unary_stream_rpc_method_handler(self.stream)
        if call_details.method == "/t/Coded":
            return grpc.unary_unary_rpc_method_handler(self.coded)
        if call_details.method == "/t/Odd":
            return grpc.unary_unary_rpc_method_handler(self.odd)
        if call_details.method == "/t/Long":
            return grpc.unary_unary_rpc_method_handler(self.long)
        return grpc.unary_unary_rpc_method_handler(self.one)

    def one(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        raise getattr(errors, request.decode())("the reason")

    def long(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        raise errors.NotReady("é" * 40_000)

    def odd(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        raise errors.InvalidJob("no \x1b[2Jfile")

    def coded(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        raise errors.InvalidJob("no such file", code="PS102")

    def stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"first"
        raise getattr(errors, request.decode())("the reason")


class RaisingAio(Raising):
    """The same on asyncio."""

    async def one(self, request: bytes, context: Any) -> bytes:  # type: ignore[override]
        raise getattr(errors, request.decode())("the reason")

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:  # type: ignore[override]
        yield b"first"
        raise getattr(errors, request.decode())("the reason")


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    server = make_server(2, [ErrorInterceptor()])
    server.add_generic_rpc_handlers((Raising(),))
    port = bind(server, "127.0.0.1:0")
    server.start()
    with open_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    server.stop(None).wait()


@pytest.mark.parametrize("cls", TREE)
def test_a_class_arrives_as_itself(channel: grpc.Channel, cls: type[PsError]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/One", None, None)(cls.__name__.encode(), timeout=5)
    error = error_from_rpc(caught.value, "the server")
    assert type(error) is cls
    assert (str(error), error.code) == ("the reason", cls.code)
    assert caught.value.code() is CODES[cls]


def test_a_code_of_its_own_arrives_too(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/Coded", None, None)(b"", timeout=5)
    error = error_from_rpc(caught.value, "the server")
    assert type(error) is errors.InvalidJob
    assert (error.code, error.coded) == ("PS102", "PS102: no such file")


def test_no_terminal_obeys_a_servers_words(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/Odd", None, None)(b"", timeout=5)
    assert "\x1b" in str(caught.value.details())
    assert str(error_from_rpc(caught.value, "the server")) == "no \ufffd[2Jfile"


def test_a_reason_keeps_the_code_it_begins_with() -> None:
    error = errors.JobFailed(errors.InvalidJob("labels are strings", code="PS106").coded)
    assert error_line(error, "job failed: ") == "error PS106: job failed: labels are strings"
    assert errors.JobFailed("PS12: no code").code == "PS601"


def test_a_message_too_long_for_a_status_is_cut(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/Long", None, None)(b"", timeout=30)
    error = error_from_rpc(caught.value, "the server")
    assert type(error) is errors.NotReady
    assert str(error) == "é" * (LONGEST_DETAILS // 2) + " ..."


def test_an_error_in_the_middle_of_a_stream_arrives_too(channel: grpc.Channel) -> None:
    replies = iter(channel.unary_stream("/t/Stream", None, None)(b"StaleGeneration", timeout=5))
    assert next(replies) == b"first"
    with pytest.raises(grpc.RpcError) as caught:
        next(replies)
    assert type(error_from_rpc(caught.value, "the server")) is StaleGeneration


async def _ask_aio() -> list[PsError]:
    server = make_aio_server([AioErrorInterceptor()])
    server.add_generic_rpc_handlers((RaisingAio(),))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    found = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await channel.unary_unary("/t/One", None, None)(b"RoundPassed", timeout=5)
        except grpc.RpcError as error:
            found.append(error_from_rpc(error, "the server"))
        replies = channel.unary_stream("/t/Stream", None, None)(b"InvalidArgument", timeout=5)
        assert await replies.read() == b"first"
        try:
            await replies.read()
        except grpc.RpcError as error:
            found.append(error_from_rpc(error, "the server"))
    await server.stop(None)
    return found


def test_the_asyncio_server_does_the_same() -> None:
    import asyncio

    found = asyncio.run(_ask_aio())
    assert [type(error) for error in found] == [errors.RoundPassed, InvalidArgument]
    assert [str(error) for error in found] == ["the reason", "the reason"]


def test_an_address_without_a_server_is_unreachable() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with open_channel(f"127.0.0.1:{port}") as opened, pytest.raises(grpc.RpcError) as caught:
        opened.unary_unary("/t/One", None, None)(b"", timeout=5)
    error = error_from_rpc(caught.value, "shard 1 at host:5001")
    assert type(error) is NotConnected
    assert str(error) == "shard 1 at host:5001: unreachable: Connection refused"


def test_too_large_a_message_is_no_matter_of_trying_again(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t/One", None, None)(bytes(MAX_MESSAGE_BYTES + 1), timeout=30)
    error = error_from_rpc(caught.value, "the server")
    assert type(error) is errors.ResourceExhausted
    assert not error.retryable


def test_a_port_in_use_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = make_server(1), make_server(1)
    port = bind(first, "127.0.0.1:0")
    with pytest.raises(PortInUse, match=f"port {port} is in use by another process"):
        bind(second, f"127.0.0.1:{port}")
    first.stop(None).wait()
    assert capfd.readouterr().err == "", "gRPC has no say of its own"


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    with pytest.raises(PortInUse, match=rf"cannot listen on {re.escape(host)}:0: .*check --bind"):
        bind(make_server(1), f"{host}:0", Security(insecure=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:5000", ("host", 5000)),
        (":5000", ("0.0.0.0", 5000)),
        ("[::1]:5000", ("::1", 5000)),
        ("[::1]", ("::1", 7)),
        ("host", ("host", 7)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text, default_port=7) == expected


@pytest.mark.parametrize("text", ["host", "host:", "host:http", "host:70000", "host:-1"])
def test_addresses_without_a_port_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="host"):
        parse_address(text)
