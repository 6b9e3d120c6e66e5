"""How many calls each address has under way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from psrpc.core.errors import NotReady


class Peers:
    """At most ``most`` calls of each address. Thread-safe, and nothing waits in here."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()

    @contextmanager
    def present(self, peer: str) -> Iterator[None]:
        """A call of ``peer``, as gRPC names it (``ipv4:192.0.2.1:4711``), for the length of a
        block. Its port does not matter: each connection has another.

        Raises:
            NotReady: its address has as many as it may.
        """
        address = peer.rpartition(":")[0]
        with self._lock:
            if self._calls[address] >= self._most:
                raise NotReady(
                    f"{address.partition(':')[2]} has {self._most} calls under way, as many as one "
                    "address may have; try again"
                )
            self._calls[address] += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls[address] -= 1
                if not self._calls[address]:
                    del self._calls[address]
