"""Broken routes: which workers cannot reach which shards, and since when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.core.wording import duration
from coordinator.membership.membership import Shard, Worker


@dataclass(frozen=True, slots=True)
class Routes:
    """What is broken between the workers and the shards that are there.

    Attributes:
        broken: by worker, the shards that it cannot reach and another worker can, and since when.
        unreached: the shards that no worker reaches, and since when. That is one fault, of the
            shard or of its network, and no worker's.
    """

    broken: Mapping[str, Mapping[int, float]]
    unreached: Mapping[int, float]

    def lines(self, workers: Mapping[str, Worker], shards: list[Shard], now: float) -> list[str]:
        """One sentence for each shard that no worker reaches, and for each broken route of
        ``workers``, those that are there."""
        found = [
            f"no worker reaches {shards[shard]} (for {duration(now - since)}); check that machine's"
            " network and firewall, and the address that it gives (--advertise)"
            for shard, since in sorted(self.unreached.items())
        ]
        return found + [
            f"{name} on {workers[name].host} cannot reach {shards[shard]} (for "
            f"{duration(now - since)}), other workers can; it gets no work until it does"
            for name, cut in sorted(self.broken.items())
            if name in workers
            for shard, since in sorted(cut.items())
        ]


def read_routes(workers: Iterable[Worker], shards: Iterable[Shard]) -> Routes:
    """Judges what the workers that are there report of the shards that are there. A shard that is
    away is awaited anyway: no route to it counts."""
    active = [worker for worker in workers if worker.state == "active"]
    broken: dict[str, dict[int, float]] = {}
    unreached: dict[int, float] = {}
    for shard in shards:
        if shard.state != "ready" or not shard.watching:
            continue
        cut = {w.name: w.unreachable[shard.index] for w in active if shard.index in w.unreachable}
        if cut and len(cut) == len(active):
            unreached[shard.index] = min(cut.values())
            continue
        for name, since in cut.items():
            broken.setdefault(name, {})[shard.index] = since
    return Routes(broken, unreached)
