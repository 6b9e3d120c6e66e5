"""The configuration of ``pserver serve``, and the address that the shard announces."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field

from psrpc.core.errors import CoordinatorUnreachable, InvalidArgument
from psrpc.net.channel import COORDINATOR_PORT, format_address, is_loopback, parse_address
from psrpc.options.settings import OFF, ShardOptions
from psrpc.security.credentials import PLAINTEXT, Security


@dataclass(frozen=True)
class ServeConfig(ShardOptions):
    """The options of a shard's process, checked by the constructor.

    Attributes:
        bind: HOST:PORT to listen on, port 0 for any. Empty means any free port: on loopback if the
            coordinator's address is a loopback address and ``advertise`` is None, otherwise on all
            interfaces.
        metrics: HOST:PORT for Prometheus, or "off", which is the default of this class (not of the
            command).
        security: the shard's certificates.

    Raises:
        InvalidArgument: a value is invalid.
    """

    metrics: str = field(default=OFF, kw_only=True)
    security: Security = field(default=PLAINTEXT, kw_only=True)

    def __post_init__(self) -> None:
        if self.shard < 0:
            raise InvalidArgument(f"--shard is {self.shard}; expected 0 or more")
        if not self.connect_timeout_s >= 0:
            raise InvalidArgument(
                f"--connect-timeout is {self.connect_timeout_s}; expected seconds, 0 or more"
            )
        host, port = parse_address(self.coordinator, COORDINATOR_PORT)
        object.__setattr__(self, "coordinator", format_address(host, port))
        if self.advertise is not None:
            parse_address(self.advertise, 0)
        if not self.bind:
            alone = is_loopback(host) and self.advertise is None
            object.__setattr__(self, "bind", "127.0.0.1:0" if alone else "0.0.0.0:0")
        parse_address(self.bind)
        if self.metrics != OFF:
            parse_address(self.metrics)
        if self.data_connections != OFF:
            parse_address(f":{self.data_connections}")


def advertised_address(bind: str, port: int, advertise: str | None, coordinator: str) -> str:
    """Returns the HOST:PORT to register.

    Args:
        bind: HOST:PORT as configured.
        port: the actual listening port.
        advertise: HOST[:PORT] that overrides all else; its port defaults to ``port``.
        coordinator: HOST:PORT. When all interfaces are bound, the host is this machine's source
            address on the route to the coordinator.

    Raises:
        CoordinatorUnreachable: there is no route to the coordinator, or its name cannot be resolved
            (yet).
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
            # Connecting a datagram socket sends nothing; it only selects the route.
            probe.connect(where)
            name: tuple[str, int] = probe.getsockname()[:2]
    except OSError as error:
        raise CoordinatorUnreachable(
            f"there is no way to the coordinator at {coordinator}: {error.strerror or error}",
            code="PS207",
        ) from None
    return name[0]
