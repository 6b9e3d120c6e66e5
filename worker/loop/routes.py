"""Finds the shards that do not answer a worker, from its calls and a cheap probe."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from psrpc.net.channel import parse_address
from psrpc.ops.threads import THREADS, Threads

SUSPECT_S = 1.5
"""Seconds without an answer after which a call has its shard's address probed."""

PROBE_S = 3.0
"""Connect timeout, and least time between probes of one shard, in seconds. Exceeds TCP's first two
retransmissions, in case of packet loss."""

PROBES = 16
"""Greatest number of simultaneous probes; other shards are probed the next time."""


def connects(address: str, timeout_s: float = PROBE_S) -> bool:
    """Whether a TCP connection to HOST:PORT succeeds. The kernel of the shard's host accepts it,
    so a stalled or busy shard counts as reachable."""
    try:
        with socket.create_connection(parse_address(address), timeout_s):
            return True
    except OSError:
        return False


class RouteProbe:
    """Tracks the routes of one worker to its shards, by index. Thread-safe.

    A route breaks when a call gets no answer, or when a call is late and a probe fails. It is whole
    again once a call is answered or, while no call is in flight, a probe succeeds. (A firewall may
    drop packets at any moment of a call, which gRPC notices only after half a minute.)
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        connects: Callable[[str], bool] = connects,
        threads: Threads = THREADS,
    ) -> None:
        """``connects`` returns whether an address is reachable; it may take a few seconds."""
        self._clock = clock
        self._connects = connects
        self._threads = threads
        self._lock = threading.Lock()
        self._shards: tuple[tuple[str, int], ...] = ()
        self._asked: dict[int, float] = {}
        self._probed: dict[int, float] = {}
        self._broken: dict[int, float] = {}

    def joined(self, shards: Sequence[tuple[str, int]]) -> None:
        """Records addresses and incarnations of the cluster's shards. A shard whose address or
        process changed starts with a whole route."""
        with self._lock:
            for shard, (before, now) in enumerate(zip(self._shards, shards, strict=False)):
                if before != now:
                    self._broken.pop(shard, None)
            self._shards = tuple(shards)
            self._asked.clear()

    def asked(self, shard: int) -> None:
        """Records that a call to ``shard`` begins."""
        with self._lock:
            self._asked[shard] = self._clock()
            self._probed.pop(shard, None)

    def answered(self, shard: int) -> bool:
        """Records any answer to the call; returns whether the route had been broken."""
        with self._lock:
            self._asked.pop(shard, None)
            return self._broken.pop(shard, None) is not None

    def failed(self, shard: int) -> None:
        """Records that one try of the call got no answer."""
        with self._lock:
            self._broken.setdefault(shard, self._clock())

    def given_up(self, shard: int) -> None:
        """Records that the call ended without an answer."""
        with self._lock:
            self._asked.pop(shard, None)

    def unreachable(self) -> dict[int, float]:
        """Returns the shards with a broken route and for how many seconds it has been broken."""
        with self._lock:
            now = self._clock()
            return {shard: now - since for shard, since in self._broken.items()}

    def probe(self) -> bool:
        """Probes all due shards at once; returns whether any route changed. One thread calls it
        regularly; it may block for some seconds."""
        found: list[int] = []
        due = [partial(self._probe, shard, asked, found) for shard, asked in self._due()[:PROBES]]
        others = [self._threads.thread(probe, "probe") for probe in due[1:]]
        for thread in others:
            thread.start()
        # The calling thread runs the first probe.
        for probe in due[:1]:
            probe()
        for thread in others:
            thread.join()
        return bool(found)

    def _probe(self, shard: int, asked: float | None, found: list[int]) -> None:
        """Probes ``shard``; adds it to ``found`` if its route has changed."""
        reached = self._connects(self._shards[shard][0])
        with self._lock:
            self._probed[shard] = self._clock()
            if self._asked.get(shard) != asked:
                return  # a call began or ended meanwhile; its outcome is more recent
            if asked is None and reached:
                if self._broken.pop(shard, None) is not None:
                    found.append(shard)
            elif asked is not None and not reached:
                if shard not in self._broken:
                    found.append(shard)
                self._broken.setdefault(shard, asked)

    def _due(self) -> list[tuple[int, float | None]]:
        """Returns the shards to probe, each with the start time of its call in flight, if any.
        Leaves out broken routes with a call in flight: its answer will show that the route is
        whole."""
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
