"""Asks a server's standard gRPC health service: ``python -m psrpc.health HOST:PORT``.

For container health checks. Exit status 0 when it serves, 1 when it does not or does not answer,
2 for an address that cannot be.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psrpc.certificates import certificate_name
from psrpc.channel import open_channel, parse_address
from psrpc.errors import InvalidArgument
from psrpc.identity import Role
from psrpc.security import PLAINTEXT, Security
from psrpc.security_options import add_security_arguments, certificates_directory, from_arguments

SHARDS = "psrpc.v1.ParameterServer"


def why_unhealthy(
    address: str,
    service: str,
    timeout_s: float,
    security: Security = PLAINTEXT,
    peer: Role = Role.COORDINATOR,
) -> str:
    """Empty when ``service`` at ``address`` is SERVING, otherwise why not, in words.

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
            status = stub.Check(request, timeout=timeout_s, wait_for_ready=True).status
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.NOT_FOUND:
                return f"{address} does not know {name}"
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"{address} did not answer within {timeout_s:g} s"
            return f"{address}: {code.name} {error.details() or ''}".rstrip()
    if status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{name} at {address} is {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}"


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m psrpc.health", description="Ask a server's gRPC health service."
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--service", default="", help="full name; default: the whole server")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role if role.serves],
        help="what the server is, where there are certificates; default: as --service says, or a "
        "coordinator",
    )
    add_security_arguments(parser, listens=False)
    args = parser.parse_args(argv)
    peer = Role.SHARD if args.service == SHARDS else Role.COORDINATOR
    try:
        parse_address(args.address)
        security = from_arguments(_own_role(args), args)
        peer = Role(args.role) if args.role else peer
        reason = why_unhealthy(args.address, args.service, args.timeout, security, peer)
    except InvalidArgument as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if reason:
        print(f"unhealthy: {reason}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _own_role(args: argparse.Namespace) -> Role:
    """A role that there is a certificate of: everybody may ask."""
    certs = certificates_directory(args)
    found = (role for role in Role if certs and (certs / certificate_name(role)).exists())
    return next(found, Role.OPERATOR)


if __name__ == "__main__":
    sys.exit(main())
