"""Asks a server's standard gRPC health service: what the commands ``healthcheck`` do."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psrpc.net.channel import open_channel
from psrpc.net.reach import why_unreachable
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role

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
