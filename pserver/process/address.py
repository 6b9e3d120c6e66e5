"""The address by which others reach this shard."""

from __future__ import annotations

import ipaddress
import socket

from psrpc.core.errors import CoordinatorUnreachable
from psrpc.net.channel import format_address, parse_address


def advertised_address(bind: str, port: int, advertise: str | None, coordinator: str) -> str:
    """HOST:PORT to register.

    Args:
        bind: HOST:PORT as it was asked for.
        port: that is listened on.
        advertise: HOST[:PORT], goes before anything else; its port defaults to ``port``.
        coordinator: HOST:PORT. When all interfaces are bound, the address that this machine uses
            towards it is the one that others in the cluster know it by.

    Raises:
        CoordinatorUnreachable: there is no way to the coordinator, or its name is unknown (yet).
    """
    if advertise is not None:
        host, named = parse_address(advertise, port)
        return format_address(host, named or port)
    host, _ = parse_address(bind)
    if not _is_wildcard(host):
        return format_address(host, port)
    return format_address(_own_address_towards(coordinator), port)


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _own_address_towards(coordinator: str) -> str:
    host, port = parse_address(coordinator)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            # Connecting a datagram socket sends nothing; it only chooses the route.
            probe.connect(where)
            name: tuple[str, int] = probe.getsockname()[:2]
    except OSError as error:
        raise CoordinatorUnreachable(
            f"there is no way to the coordinator at {coordinator}: {error.strerror or error}",
            code="PS207",
        ) from None
    return name[0]
