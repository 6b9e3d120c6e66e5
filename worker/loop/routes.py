"""Which shards a worker gets no answer from, found out by its calls and by a cheap probe."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from psrpc.net.channel import parse_address
from psrpc.ops.threads import THREADS, Threads

SUSPECT_S = 1.5
"""A call that has not been answered for so long has its shard's address probed."""

PROBE_S = 3.0
"""A connection that is not made within this time cannot be made: longer than the first two
retransmissions of TCP, in case a packet was lost. Between probes of one shard, as well."""

PROBES = 16
"""At once, at most; the others are due the next time."""


def connects(address: str, timeout_s: float = PROBE_S) -> bool:
    """Whether a TCP connection to HOST:PORT can be made. The kernel of a shard's host makes it, so
    a shard that stands still or is busy can be reached."""
    try:
        with socket.create_connection(parse_address(address), timeout_s):
            return True
    except OSError:
        return False


class Routes:
    """The routes of one worker to the shards of its cluster, by index. Thread-safe.

    A route is broken when a call gets no answer, or when one is late and a probe fails, until a
    call is answered. Where no call is under way, probes say when it is whole. (A firewall may
    swallow what is sent at any moment of a call, which gRPC notices only after half a minute.)
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        connects: Callable[[str], bool] = connects,
        threads: Threads = THREADS,
    ) -> None:
        """``connects`` says whether an address can be reached; it may take a few seconds."""
        self._clock = clock
        self._connects = connects
        self._threads = threads
        self._lock = threading.Lock()
        self._shards: tuple[tuple[str, int], ...] = ()
        self._asked: dict[int, float] = {}
        self._probed: dict[int, float] = {}
        self._broken: dict[int, float] = {}

    def joined(self, shards: Sequence[tuple[str, int]]) -> None:
        """The shards of the cluster have these addresses and incarnations; a route to another
        address or process than before is another one."""
        with self._lock:
            for shard, (before, now) in enumerate(zip(self._shards, shards, strict=False)):
                if before != now:
                    self._broken.pop(shard, None)
            self._shards = tuple(shards)
            self._asked.clear()

    def asked(self, shard: int) -> None:
        """A call to ``shard`` begins."""
        with self._lock:
            self._asked[shard] = self._clock()
            self._probed.pop(shard, None)

    def answered(self, shard: int) -> bool:
        """The call was answered, by whatever; whether the route had been broken."""
        with self._lock:
            self._asked.pop(shard, None)
            return self._broken.pop(shard, None) is not None

    def failed(self, shard: int) -> None:
        """A try of the call got no answer."""
        with self._lock:
            self._broken.setdefault(shard, self._clock())

    def given_up(self, shard: int) -> None:
        """The call has ended without an answer."""
        with self._lock:
            self._asked.pop(shard, None)

    def unreachable(self) -> dict[int, float]:
        """The shards that are not reached, and for how long, in seconds."""
        with self._lock:
            now = self._clock()
            return {shard: now - since for shard, since in self._broken.items()}

    def probe(self) -> bool:
        """Probes shards where that is due, all at once; whether a route was found broken, or whole.
        Call it now and then, from one thread that may be blocked for some seconds."""
        found: list[int] = []
        due = [partial(self._probe, shard, asked, found) for shard, asked in self._due()[:PROBES]]
        others = [self._threads.thread(probe, "probe") for probe in due[1:]]
        for thread in others:
            thread.start()
        # The calling thread takes the first.
        for probe in due[:1]:
            probe()
        for thread in others:
            thread.join()
        return bool(found)

    def _probe(self, shard: int, asked: float | None, found: list[int]) -> None:
        """Probes ``shard``; adds it to ``found`` if its route is broken or whole since then."""
        reached = self._connects(self._shards[shard][0])
        with self._lock:
            self._probed[shard] = self._clock()
            if self._asked.get(shard) != asked:
                return  # a call has begun or ended meanwhile, and knows better
            if asked is None and reached:
                if self._broken.pop(shard, None) is not None:
                    found.append(shard)
            elif asked is not None and not reached:
                if shard not in self._broken:
                    found.append(shard)
                self._broken.setdefault(shard, asked)

    def _due(self) -> list[tuple[int, float | None]]:
        """Shards that are to be probed, and since when a call to each is under way. A call on a
        broken route finds out by itself when it is whole."""
        with self._lock:
            now = self._clock()
            late = {s: t for s, t in self._asked.items() if now - t >= SUSPECT_S}
            left = {shard: None for shard in self._broken if shard not in self._asked}
            return [
                (shard, asked)
                for shard, asked in {**late, **left}.items()
                if (asked is None or shard not in self._broken)
                and now - self._probed.get(shard, -PROBE_S) >= PROBE_S
            ]
