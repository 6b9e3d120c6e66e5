"""Opens channels and listening ports, and parses addresses, with the same options in every
process."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from psrpc.core.errors import InvalidArgument, PortInUse
from psrpc.net.limits import COMMON_OPTIONS, MAX_CALLS, SERVER_OPTIONS
from psrpc.net.overload import AioLoadInterceptor, CountingPool, LoadInterceptor
from psrpc.net.reloading_channel import SecureChannel
from psrpc.security.authorization import AioAuthorizationInterceptor, AuthorizationInterceptor
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.identity import Role, server_name

COORDINATOR_PORT = 5000
"""Default port of a coordinator."""

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *COMMON_OPTIONS,
    # Keeps cluster traffic from going through a web proxy that the environment names.
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One connection per channel, so clients in a process never share a broken one.
    ("grpc.use_local_subchannel_pool", 1),
]


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Splits ``HOST:PORT``, ``[V6]:PORT``, ``:PORT`` or, with a default port, ``HOST``.

    Raises:
        InvalidArgument: a required port is missing, or it is not a port number.
    """
    host, colon, port = text.rpartition(":")
    if not colon or (port.endswith("]") and text.startswith("[")):
        host, port = text, ""
    host = host.strip("[]")
    if not port and default_port is None:
        raise InvalidArgument(f"address {text!r} has no port; expected HOST:PORT", code="PS111")
    try:
        number = int(port) if port else int(default_port or 0)
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise InvalidArgument(
            f"address {text!r} has port {port!r}; expected 0 to 65535", code="PS111"
        )
    return host or "0.0.0.0", number


def format_address(host: str, port: int) -> str:
    """Joins ``HOST:PORT``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is ``localhost`` or a loopback IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_channel(
    address: str, security: Security = PLAINTEXT, peer: Role = Role.SHARD
) -> grpc.Channel:
    """Opens a channel to ``HOST:PORT`` that connects on first use.

    Args:
        peer: the role that the server's certificate must have.

    Raises:
        InvalidArgument: plaintext to another machine without ``--insecure``.
    """
    if not security.encrypted:
        check_reachable(address, security)
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    # The certificate must have this name, because certificates name a role, not a machine.
    name = ("grpc.ssl_target_name_override", server_name(security.job, peer))

    def connect() -> grpc.Channel:
        return grpc.secure_channel(
            address, security.channel_credentials(), options=[*CHANNEL_OPTIONS, name]
        )

    return SecureChannel(connect, security.files.stamp)


def check_reachable(address: str, security: Security) -> None:
    """Raises InvalidArgument if ``security`` forbids sending to ``HOST:PORT``."""
    if not security.encrypted:
        _check_plaintext(address, security, "to send anything to", "change the model")


def make_server(
    threads: int,
    interceptors: Sequence[grpc.ServerInterceptor[Any, Any]] = (),
    security: Security = PLAINTEXT,
) -> grpc.Server:
    """Makes a server with ``threads`` handler threads for callers that ``security`` admits."""
    first = [AuthorizationInterceptor(security)] if security.encrypted else []
    pool = CountingPool(threads)
    return grpc.server(
        pool,
        interceptors=[*first, *interceptors, LoadInterceptor(pool, threads)],
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=MAX_CALLS,
    )


def make_aio_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    security: Security = PLAINTEXT,
) -> grpc.aio.Server:
    """Makes an asyncio server for callers that ``security`` admits; needs a running loop."""
    first = [AioAuthorizationInterceptor(security)] if security.encrypted else []
    return grpc.aio.server(
        interceptors=[*first, *interceptors, AioLoadInterceptor()],
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=MAX_CALLS,
    )


def bind(
    server: grpc.Server | grpc.aio.Server, address: str, security: Security = PLAINTEXT
) -> int:
    """Makes ``server`` listen on ``HOST:PORT`` and returns the port (chosen by the OS for 0).

    Args:
        security: the settings that the server was made with.

    Raises:
        PortInUse: another process listens there, or the host is not one of this machine.
        InvalidArgument: plaintext that other machines can reach, without ``--insecure``.
    """
    host, port = parse_address(address)
    address = format_address(host, port)
    if not security.encrypted:
        _check_plaintext(address, security, "to listen on", "change the model")
    # Tries the address first, since gRPC writes its own lines to standard error if it cannot
    # listen.
    why = _why_not(host, port)
    if not why:
        security.announce()
        try:
            if security.encrypted:
                return int(server.add_secure_port(address, security.server_credentials()))
            return int(server.add_insecure_port(address))
        except RuntimeError:
            why = _why_not(host, port) or "refused by gRPC; check --bind"
    raise PortInUse(f"cannot listen on {address}: {why}")


def check_metrics_address(address: str, security: Security) -> None:
    """Raises InvalidArgument if ``security`` forbids serving metrics at ``HOST:PORT``."""
    if security.by_token and not is_loopback(parse_address(address)[0]):
        raise InvalidArgument(
            f"--metrics {address} asks its readers for a certificate, which --token-file does "
            "without; say --metrics 127.0.0.1:PORT, or give each role its certificate",
            code="PS322",
        )
    if not security.encrypted:
        _check_plaintext(address, security, "to serve --metrics at", "read the job's figures")


def _check_plaintext(address: str, security: Security, what: str, harm: str) -> None:
    if not security.insecure and not is_loopback(parse_address(address)[0]):
        raise InvalidArgument(
            f"{what} {address} in plaintext would let everybody on the network {harm}; "
            "say --certs DIR (made by `coordinator certs init DIR`), or --insecure where the "
            "network is yours alone",
            code="PS321",
        )


def _why_not(host: str, port: int) -> str:
    """Returns why the operating system refuses to listen there; empty if it would not."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"{getattr(error, 'strerror', None) or error}; check --bind"
    why = ""
    for family, kind, proto, _, where in found:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen()
        except OSError as error:
            why = f"{error.strerror or error}; check --bind"
            if error.errno == errno.EADDRINUSE:
                why = f"port {port} is in use by another process; stop it or choose another --bind"
        else:
            # One usable address of a name is enough, as for gRPC.
            return ""
    return why
