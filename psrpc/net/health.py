"""The standard gRPC health service: the client that ``healthcheck`` commands use, and the
servicers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from psrpc.net.channel import is_loopback, open_channel, parse_address
from psrpc.net.reach import why_unreachable
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role

LIVES = ""
"""The health name under which a server is SERVING from start to stop. Under the name of its service
the server reports whether it serves its part of a job."""

WHY = "this server's health cannot be watched; ask grpc.health.v1.Health/Check again and again"

LOOK_S = 1.0
"""Time limit per step of diagnosing an unreachable server."""


def why_unhealthy(
    address: str,
    service: str,
    timeout_s: float,
    security: Security = PLAINTEXT,
    peer: Role = Role.COORDINATOR,
) -> str:
    """Returns why ``service`` at ``address`` is not SERVING, with an error code if the server is
    unreachable; empty if it is SERVING.

    Args:
        service: e.g. ``"psrpc.v1.Coordinator"``; empty for the server as a whole.
        security: the settings of this process, which may have any role.
        peer: the role that the server's certificate must have.

    Raises:
        InvalidArgument: the address is on another machine, and there are no certificates.
    """
    name = service or "the server"
    with open_channel(address, security, peer) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            status = stub.Check(request, timeout=timeout_s).status
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.NOT_FOUND:
                return f"{address} does not know {name}"
            cause = why_unreachable(address, security, peer, min(timeout_s, LOOK_S))
            if cause is not None:
                return cause.coded
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"{address} did not answer within {timeout_s:g} s"
            return f"{address}: {code.name} {error.details() or ''}".rstrip()
    if status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{name} at {address} is {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}"


class HealthServicer(health.HealthServicer):
    """The health service of threaded servers, without ``Watch``."""

    def Watch(  # noqa: N802
        self, _request: Any, context: grpc.ServicerContext, _callback: Any = None
    ) -> NoReturn:
        """Refuses at once with UNIMPLEMENTED, which clients do not retry."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, WHY)


class AioHealthServicer(health.aio.HealthServicer):  # type: ignore[name-defined,misc]  # made at import
    """The health service of asyncio servers, without ``Watch``."""

    async def Watch(self, _request: Any, context: Any) -> None:  # noqa: N802
        """Refuses at once, see :class:`HealthServicer`."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, WHY)


def offer_reflection(
    server: grpc.Server | grpc.aio.Server, services: Sequence[str], address: str, asked: bool
) -> None:
    """Enables gRPC reflection on ``server``, before it starts.

    Args:
        services: full names; the generated code of each must be imported.
        address: HOST:PORT that the server listens on.
        asked: whether to enable it on addresses other than loopback, too.
    """
    if asked or is_loopback(parse_address(address)[0]):
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
