"""Asks a server's standard gRPC health service: what the commands ``healthcheck`` do."""

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
"""The name under which a server says that it lives, from its first moment until it stops. Under the
name of its service it says whether it serves its part of a job."""

WHY = "this server's health cannot be watched; ask grpc.health.v1.Health/Check again and again"


LOOK_S = 1.0
"""At most, for each step of finding out why nobody answers."""


def why_unhealthy(
    address: str,
    service: str,
    timeout_s: float,
    security: Security = PLAINTEXT,
    peer: Role = Role.COORDINATOR,
) -> str:
    """Empty when ``service`` at ``address`` is SERVING, otherwise why not, in words; with a code
    where it is not reached.

    Args:
        service: e.g. ``"psrpc.v1.Coordinator"``; empty for the server as a whole.
        security: of any role.
        peer: what the server is; where there are certificates, it has to be that.

    Raises:
        InvalidArgument: the address is another machine's, and there are no certificates.
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
    """For servers with threads."""

    def Watch(  # noqa: N802
        self, _request: Any, context: grpc.ServicerContext, _callback: Any = None
    ) -> NoReturn:
        """Refuses at once, with the status by which clients know that they need not try again."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, WHY)


class AioHealthServicer(health.aio.HealthServicer):  # type: ignore[name-defined,misc]  # made at import
    """For asyncio servers."""

    async def Watch(self, _request: Any, context: Any) -> None:  # noqa: N802
        """Refuses at once, as the other does."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, WHY)


def describe(
    server: grpc.Server | grpc.aio.Server, services: Sequence[str], address: str, asked: bool
) -> None:
    """Makes ``server`` answer such questions; call it before the server starts.

    Args:
        services: full names; the generated code of each is imported.
        address: HOST:PORT that the server listens on.
        asked: do so on any address.
    """
    if asked or is_loopback(parse_address(address)[0]):
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
