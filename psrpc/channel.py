"""Channels, listening ports and addresses: one set of options for every process."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import grpc
import grpc.aio

from psrpc.errors import InvalidArgument, PortInUse

COORDINATOR_PORT = 5000
"""Where a coordinator is unless somebody says otherwise."""

MAX_MESSAGE_BYTES = 8 << 20
"""Tensors travel in chunks of 2 MiB; nothing needs a larger message."""

_COMMON: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    # A cluster's own traffic never goes through a web proxy that the environment names.
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One connection per channel: no sharing of a broken one with another client in the process.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Splits ``HOST:PORT``, ``[V6]:PORT``, ``:PORT`` or, with a default port, ``HOST``.

    Raises:
        InvalidArgument: no port where one is needed, or not a port number.
    """
    host, colon, port = text.rpartition(":")
    if not colon or (port.endswith("]") and text.startswith("[")):
        host, port = text, ""
    host = host.strip("[]")
    if not port and default_port is None:
        raise InvalidArgument(f"address {text!r} has no port; expected HOST:PORT")
    try:
        number = int(port) if port else int(default_port or 0)
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise InvalidArgument(f"address {text!r} has port {port!r}; expected 0 to 65535")
    return host or "0.0.0.0", number


def format_address(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_channel(address: str) -> grpc.Channel:
    """A channel to ``HOST:PORT``; connects when first used."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def make_server(
    threads: int, interceptors: Sequence[grpc.ServerInterceptor[Any, Any]] = ()
) -> grpc.Server:
    """A server whose handlers run on ``threads`` threads."""
    return grpc.server(
        futures.ThreadPoolExecutor(threads, thread_name_prefix="rpc"),
        interceptors=list(interceptors),
        options=SERVER_OPTIONS,
    )


def make_aio_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
) -> grpc.aio.Server:
    """An asyncio server; call it within a running loop."""
    return grpc.aio.server(interceptors=list(interceptors), options=SERVER_OPTIONS)


def bind(server: grpc.Server | grpc.aio.Server, address: str) -> int:
    """Makes ``server`` listen on ``HOST:PORT`` and returns the port (chosen by the OS for 0).

    Raises:
        PortInUse: another process listens there, or the host is not one of this machine.
    """
    host, port = parse_address(address)
    address = format_address(host, port)
    # First, since gRPC writes lines of its own on standard error when it cannot.
    why = _why_not(host, port)
    if not why:
        try:
            return int(server.add_insecure_port(address))
        except RuntimeError:
            why = _why_not(host, port) or "refused by gRPC; check --bind"
    raise PortInUse(f"cannot listen on {address}: {why}")


def _why_not(host: str, port: int) -> str:
    """Why the operating system lets nobody listen there; empty if it would."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"{error.strerror or error}; check --bind"
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
            # Of the addresses that a name stands for, gRPC is content with one, too.
            return ""
    return why
