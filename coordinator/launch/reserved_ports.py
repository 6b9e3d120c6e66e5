"""Addresses of this machine that processes can have each time they are started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_address() -> Iterator[str]:
    """An address of this host that a server can have each time it is started.

    The kernel gives the port of a bound socket to nobody who asks for any port, be it to listen or
    to connect from. A server that allows addresses to be used again, as gRPC's do, can bind to it
    nevertheless while the socket does not listen.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
