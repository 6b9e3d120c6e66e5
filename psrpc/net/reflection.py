"""gRPC reflection: callers such as grpcurl can ask a server what its services look like.

On this machine's own addresses always, elsewhere only if asked for: it tells nothing that is secret
and nothing that a peer of ours needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from psrpc.net.channel import is_loopback, parse_address


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
