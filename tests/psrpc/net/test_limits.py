"""Bounds on the cost of one peer: on real servers and sockets, small enough to reach."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from psrpc.core.errors import NotReady
from psrpc.net import channel as channel_module
from psrpc.net import limits
from psrpc.net import overload as load
from psrpc.net.channel import bind, make_aio_server, make_server, open_channel
from psrpc.net.limits import SERVER_OPTIONS, VITAL, VITAL_THREADS, VITAL_UNREAD
from psrpc.net.overload import AioLoadInterceptor, CountingPool, LoadInterceptor, Peers
from psrpc.net.request import RequestReader, read_request
from psrpc.security.identity import PERMISSIONS
from psrpc.wire.interceptor import AioErrorInterceptor, ErrorInterceptor
from psrpc.wire.status import error_from_rpc

LONG_S = 30.0


class Parked:
    """Calls that stay until they are released."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.released = threading.Event()

    def wait(self, request: bytes, _context: Any) -> bytes:
        self.begun.release()
        assert self.released.wait(LONG_S)
        return request


def _handlers(behaviour: Any) -> grpc.GenericRpcHandler[Any, Any]:
    method = grpc.unary_unary_rpc_method_handler(behaviour)
    return grpc.method_handlers_generic_handler("t", {"Wait": method})


@contextmanager
def served(parked: Parked, threads: int, waiting: int) -> Iterator[str]:
    pool = CountingPool(threads)
    server = grpc.server(
        pool,
        interceptors=[ErrorInterceptor(), LoadInterceptor(pool, threads, waiting)],
        options=SERVER_OPTIONS,
    )
    server.add_generic_rpc_handlers((_handlers(parked.wait),))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = bind(server, "127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        parked.released.set()
        server.stop(0).wait()


def test_a_call_when_all_threads_are_taken() -> None:
    parked = Parked()
    with served(parked, threads=1, waiting=1) as address, open_channel(address) as channel:
        call: Any = channel.unary_unary("/t/Wait")  # type: ignore[call-arg]
        running = call.future(b"1", timeout=LONG_S)
        assert parked.begun.acquire(timeout=LONG_S)
        waiting = call.future(b"2", timeout=LONG_S)
        # Calls of one connection arrive in the order in which they were made.
        with pytest.raises(grpc.RpcError) as caught:
            call(b"3", timeout=LONG_S)
        error = error_from_rpc(caught.value, "the server")
        assert isinstance(error, NotReady)
        assert "has 1 calls under way and 1 more that wait" in str(error)

        # Health checks are answered all the same.
        stub = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=LONG_S).status
        assert status == health_pb2.HealthCheckResponse.SERVING
        assert not waiting.done()

        parked.released.set()
        assert (running.result(), waiting.result()) == (b"1", b"2")
        assert call(b"4", timeout=LONG_S) == b"4"


def test_a_call_that_is_given_up_while_it_waits_is_counted_no_longer() -> None:
    parked = Parked()
    with served(parked, threads=1, waiting=1) as address, open_channel(address) as channel:
        call: Any = channel.unary_unary("/t/Wait")  # type: ignore[call-arg]
        running = call.future(b"1", timeout=LONG_S)
        assert parked.begun.acquire(timeout=LONG_S)
        call.future(b"2", timeout=LONG_S).cancel()
        parked.released.set()
        assert running.result() == b"1"
        assert [call(b"%d" % i, timeout=LONG_S) for i in range(4)] == [b"0", b"1", b"2", b"3"]


def test_an_asyncio_server_keeps_room_for_what_is_vital() -> None:
    async def main() -> None:
        begun, released = asyncio.Event(), asyncio.Event()

        async def wait(request: bytes, _context: Any) -> bytes:
            begun.set()
            await released.wait()
            return request

        server = grpc.aio.server(interceptors=[AioErrorInterceptor(), AioLoadInterceptor(1)])
        server.add_generic_rpc_handlers((_handlers(wait),))
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary("/t/Wait")  # type: ignore[call-arg]
            first = asyncio.ensure_future(_result(call(b"1", timeout=LONG_S)))
            await begun.wait()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"2", timeout=LONG_S)
            assert isinstance(error_from_rpc(caught.value, "the server"), NotReady)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=LONG_S)
            released.set()
            assert await first == b"1"
            assert await call(b"3", timeout=LONG_S) == b"3"
        await server.stop(0)

    asyncio.run(main())


async def _result(call: Any) -> bytes:
    answer: bytes = await call
    return answer


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server with options of the test's."""
    options = dict(SERVER_OPTIONS) | request.param
    monkeypatch.setattr(channel_module, "SERVER_OPTIONS", list(options.items()))
    server = make_server(4, [ErrorInterceptor()])
    server.add_generic_rpc_handlers((_handlers(lambda request, _context: request),))
    port = bind(server, "127.0.0.1:0")
    server.start()
    yield port
    server.stop(0).wait()


def _connected(port: int) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=LONG_S)
    found.settimeout(LONG_S)
    return found


def _read_to_the_end(connection: socket.socket) -> None:
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [{"grpc.server_handshake_timeout_ms": 100}], indirect=True)
@pytest.mark.parametrize(
    "sent", [b"", b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1"]
)
def test_a_connection_that_says_nothing_more_is_closed(bounded: int, sent: bytes) -> None:
    with _connected(bounded) as connection:
        connection.sendall(sent)
        _read_to_the_end(connection)


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [{"grpc.max_connection_idle_ms": 100}], indirect=True)
def test_a_connection_without_a_call_is_closed_and_made_again(bounded: int) -> None:
    idle = threading.Event()

    def changed(state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.IDLE and answered.is_set():
            idle.set()

    answered = threading.Event()
    with open_channel(f"127.0.0.1:{bounded}") as channel:
        call: Any = channel.unary_unary("/t/Wait")  # type: ignore[call-arg]
        call(b"1", timeout=LONG_S)
        answered.set()
        before = set(threading.enumerate())
        channel.subscribe(changed)
        polling = set(threading.enumerate()) - before
        assert idle.wait(LONG_S)
        assert call(b"2", timeout=LONG_S) == b"2"
        # The thread that polls for gRPC would fail if the channel were closed meanwhile.
        channel.unsubscribe(changed)
        for thread in polling:
            thread.join(LONG_S)


@pytest.mark.parametrize("bounded", [{"grpc.max_allowed_incoming_connections": 2}], indirect=True)
def test_no_more_connections_than_there_may_be(bounded: int) -> None:
    with open_channel(f"127.0.0.1:{bounded}") as channel:
        call: Any = channel.unary_unary("/t/Wait")  # type: ignore[call-arg]
        call(b"1", timeout=LONG_S)
        with _connected(bounded) as second, _connected(bounded) as third:
            _read_to_the_end(third)
            second.sendall(b"P")
            assert call(b"2", timeout=LONG_S) == b"2"


def test_vital_rpcs_exist() -> None:
    assert set(PERMISSIONS) >= VITAL


def test_there_is_room_for_what_we_say_we_serve() -> None:
    assert limits.MAX_CALLS >= limits.CONVERSATIONS + limits.MORE_THREADS + limits.MAX_WAITING
    assert limits.MAX_CALLS > limits.MAX_PARKED
    assert limits.MAX_CONNECTIONS >= 2 * limits.CONVERSATIONS


class Stalled:
    """Calls whose request never comes, as a peer begins them that keeps a connection busy."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel: Any = channel
        self._over = threading.Event()

    def begin(self, method: str) -> Any:
        return self._channel.stream_unary(method).future(self._requests(), timeout=LONG_S)

    def _requests(self) -> Iterator[bytes]:
        assert self._over.wait(LONG_S)
        yield from ()

    def end(self) -> None:
        self._over.set()


@pytest.fixture
def stalled() -> Iterator[Callable[[grpc.Channel], Stalled]]:
    made: list[Stalled] = []

    def make(channel: grpc.Channel) -> Stalled:
        made.append(Stalled(channel))
        return made[-1]

    yield make
    for one in made:
        one.end()


def _error(call: Any) -> Exception:
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    return error_from_rpc(caught.value, "the server")


def test_calls_of_one_address_on_whatever_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "PEER_CALLS", 2)
    parked = Parked()
    with (
        served(parked, threads=8, waiting=0) as address,
        open_channel(address) as first,
        open_channel(address) as second,
    ):
        calls: list[Any] = [c.unary_unary("/t/Wait") for c in (first, second)]  # type: ignore[call-arg]
        running = [call.future(b"1", timeout=LONG_S) for call in calls]
        for _ in running:
            assert parked.begun.acquire(timeout=LONG_S)
        for call in calls:
            error = _error(call.future(b"2", timeout=LONG_S))
            assert isinstance(error, NotReady)
            assert "127.0.0.1 has 2 calls under way, as many as one address may" in str(error)
        _check_health(first)
        parked.released.set()
        assert [call.result() for call in running] == [b"1", b"1"]
        assert [call(b"3", timeout=LONG_S) for call in calls] == [b"3", b"3"]


def test_another_address_is_served_all_the_same() -> None:
    peers = Peers(1)
    with peers.present("ipv4:192.0.2.1:4711"):
        with peers.present("ipv4:192.0.2.2:4711"), peers.present("ipv6:%5B::1%5D:4711"):
            pass
        with pytest.raises(NotReady, match=r"^192\.0\.2\.1 has 1 calls"):
            peers.present("ipv4:192.0.2.1:4712").__enter__()
    with peers.present("ipv4:192.0.2.1:4712"):
        pass


def _check_health(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    status = stub.Check(health_pb2.HealthCheckRequest(), timeout=LONG_S).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_requests_that_do_not_come_keep_no_thread_for_good(
    monkeypatch: pytest.MonkeyPatch, stalled: Callable[[grpc.Channel], Stalled]
) -> None:
    monkeypatch.setattr(load, "RequestReader", lambda: RequestReader(0.05))
    with (
        served(Parked(), threads=1, waiting=64) as address,
        open_channel(address) as channel,
    ):
        slow = stalled(channel)
        for call in [slow.begin("/t/Wait") for _ in range(3)]:
            with pytest.raises(grpc.RpcError) as caught:
                call.result()
            assert caught.value.code() is grpc.StatusCode.CANCELLED


def test_slow_requests_leave_threads_for_vital_calls(
    stalled: Callable[[grpc.Channel], Stalled],
) -> None:
    """From one address: others have the rest of the threads."""
    ended = threading.Semaphore(0)
    with served(Parked(), threads=1, waiting=0) as address, open_channel(address) as channel:
        slow = stalled(channel)
        calls = [slow.begin("/grpc.health.v1.Health/Check") for _ in range(VITAL_THREADS + 1)]
        for call in calls:
            call.add_done_callback(lambda _: ended.release())
        for _ in range(VITAL_THREADS + 1 - VITAL_UNREAD):
            assert ended.acquire(timeout=LONG_S)
        done = [call for call in calls if call.done()]
        assert len(done) == VITAL_THREADS + 1 - VITAL_UNREAD
        assert all(isinstance(_error(call), NotReady) for call in done)


def test_an_asyncio_server_bounds_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PEER_CALLS", 1)
    late = functools.partial(read_request, limit_s=0.05)

    async def main() -> None:
        begun, released = asyncio.Event(), asyncio.Event()

        async def wait(request: bytes, _context: Any) -> bytes:
            begun.set()
            await released.wait()
            return request

        server = make_aio_server([AioErrorInterceptor()])
        server.add_generic_rpc_handlers((_handlers(wait),))
        port = bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary("/t/Wait")  # type: ignore[call-arg]
            first = asyncio.ensure_future(_result(call(b"1", timeout=LONG_S)))
            await begun.wait()
            with pytest.raises(grpc.aio.AioRpcError, match="as many as one address may"):
                await call(b"2", timeout=LONG_S)
            released.set()
            assert await first == b"1"

            monkeypatch.setattr(load, "read_request", late)
            slow: Any = channel.stream_unary("/t/Wait")  # type: ignore[call-arg]
            with pytest.raises(grpc.aio.AioRpcError, match="did not come within") as caught:
                await slow(timeout=LONG_S)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call(b"3", timeout=LONG_S) == b"3"
        await server.stop(0)

    asyncio.run(main())
