"""Watching a server's health holds none of its threads or calls."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psrpc.net.channel import bind, make_aio_server, make_server, open_channel
from psrpc.net.health import AioHealthServicer, HealthServicer
from psrpc.wire.interceptor import AioErrorInterceptor, ErrorInterceptor

LONG_S = 30.0
THREADS = 2
ASKED = health_pb2.HealthCheckRequest()


def _echo(request: bytes, _context: Any) -> bytes:
    return request


async def _aio_echo(request: bytes, _context: Any) -> bytes:
    return request


def _handlers(behaviour: Any) -> grpc.GenericRpcHandler[Any, Any]:
    method = grpc.unary_unary_rpc_method_handler(behaviour)
    return grpc.method_handlers_generic_handler("t", {"Echo": method})


def test_a_shards_threads_are_not_kept_by_watches() -> None:
    server = make_server(THREADS, [ErrorInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    server.add_generic_rpc_handlers((_handlers(_echo),))
    port = bind(server, "127.0.0.1:0")
    server.start()
    with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(ASKED, timeout=LONG_S) for _ in range(THREADS + 1)]
        call: Any = channel.unary_unary("/t/Echo")  # type: ignore[call-arg]
        assert call(b"1", timeout=LONG_S) == b"1"
        for watch in watches:
            assert watch.code() == grpc.StatusCode.UNIMPLEMENTED
            assert "Health/Check" in watch.details()
        assert stub.Check(ASKED, timeout=LONG_S).status == health_pb2.HealthCheckResponse.SERVING
    server.stop(0).wait()


def test_nor_are_the_calls_of_a_coordinator() -> None:
    async def main() -> None:
        server = make_aio_server([AioErrorInterceptor()])
        health_pb2_grpc.add_HealthServicer_to_server(AioHealthServicer(), server)
        server.add_generic_rpc_handlers((_handlers(_aio_echo),))
        port = bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="Health/Check") as caught:
                await stub.Watch(ASKED, timeout=LONG_S).read()
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
            call: Any = channel.unary_unary("/t/Echo")  # type: ignore[call-arg]
            assert await call(b"1", timeout=LONG_S) == b"1"
        await server.stop(0)

    asyncio.run(main())
