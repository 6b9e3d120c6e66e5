"""Assigns slices of the parameters to the workers that host them (``dense="allreduce"``).

Pure: time is passed in, and nothing locks; the engine's loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.membership.members import Shard, Worker
from coordinator.membership.shard_places import STARTING_S, ShardPlaces

SILENT_S = 20.0
"""Silence in seconds after which a slice whose command stream is open is given to another worker: a
stopped process still has its parameters, which a move to another process loses."""

RESTART_S = 10.0
"""Seconds for which a slice that was hosted before waits for a worker that hosts none, such as a
restarted process; then a worker that hosts one gets another. After a restart of the coordinator,
hosts have as long to register their slices again."""

REGISTER_S = 5.0
"""Seconds in which a worker has to register a slice that it was given; then another gets it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """``worker`` is to host slice ``shard``, for the reason ``why``."""

    shard: int
    worker: str
    why: str


class SliceHosts:
    """Gives each slice without a host to a worker. Not thread-safe.

    A slice goes to the worker that hosts the fewest, and of those to the one that registered first.
    Before a slice has had a host, only workers that host none get it. A process whose slice has
    ended ends itself, so it does not get that slice again.
    """

    def __init__(self, places: ShardPlaces, workers: Mapping[str, Worker], now: float) -> None:
        """``places.hosted`` are the slices; ``workers`` are all by name. The owner of both changes
        them."""
        self._places = places
        self._workers = workers
        self._began = now
        self._vacant: dict[int, tuple[int, float]] = {}
        """Slice without a host -> the incarnation that served it last, and since when it does not.
        """
        self._given: dict[int, tuple[str, float]] = {}
        """Slice without a host -> the worker that is to host it, and since when."""
        self._news: list[Assignment] = []
        self._late: dict[int, set[str]] = {}
        """Slice without a host -> workers that did not register it in time."""

    def look(self, worker: str, now: float) -> list[int]:
        """Assigns the slices without a host, and returns those that ``worker`` is to host and has
        not registered. Call it at each sign of life of a worker."""
        able: list[Worker] | None = None
        for shard in self._slices():
            if not self._is_vacant(shard, now):
                for known in (self._vacant, self._given, self._late):
                    known.pop(shard.index, None)
                continue
            if self._vacant.get(shard.index, (-1, now))[0] != shard.incarnation:
                self._vacant[shard.index] = (shard.incarnation, now)
                self._given.pop(shard.index, None)
            if shard.index in self._given and not self._still(shard.index, now):
                self._late.setdefault(shard.index, set()).add(self._given.pop(shard.index)[0])
            if shard.index not in self._given:
                # Once for all slices: a thousand workers may look each second.
                able = self._able(now) if able is None else able
                self._give(shard, self._vacant[shard.index][1], able, now)
        return sorted(index for index, (name, _) in self._given.items() if name == worker)

    def news(self) -> list[Assignment]:
        """Returns the assignments since the last call, each once."""
        news, self._news = self._news, []
        return news

    def _slices(self) -> list[Shard]:
        hosted = self._places.hosted
        return self._places.shards[hosted.start : hosted.stop]

    def _is_vacant(self, shard: Shard, now: float) -> bool:
        if not shard.incarnation:
            # The process that an earlier coordinator knew registers again by itself.
            return not self._places.held_before(shard.index) or now - self._began > RESTART_S
        return now - shard.seen > (SILENT_S if shard.watching else STARTING_S)

    def _still(self, index: int, now: float) -> bool:
        """Whether the worker that was given a slice may yet register it."""
        name, since = self._given[index]
        worker = self._workers.get(name)
        return worker is not None and worker.state == "active" and now - since <= REGISTER_S

    def _able(self, now: float) -> list[Worker]:
        """Returns the workers that can host slices and were heard of lately."""
        return [
            worker
            for worker in self._workers.values()
            if worker.state == "active"
            and worker.hosts
            and now - worker.seen <= STARTING_S * worker.calm
        ]

    def _give(self, shard: Shard, since: float, able: list[Worker], now: float) -> None:
        able = [worker for worker in able if worker.incarnation != shard.worker]
        late = self._late.get(shard.index, set())
        if able and all(worker.name in late for worker in able):
            late.clear()
        hosted = {worker.name: self._count(worker, now) for worker in able}
        again = self._places.held_before(shard.index) and now - since > RESTART_S
        found = min(
            (w for w in able if w.name not in late and (again or not hosted[w.name])),
            key=lambda worker: (hosted[worker.name], worker.registered),
            default=None,
        )
        if found is None:
            return
        self._given[shard.index] = (found.name, now)
        why = f"it hosts {hosted[found.name]}; the slice has had no host for {now - since:.1f} s"
        self._news.append(Assignment(shard.index, found.name, why))

    def _count(self, worker: Worker, now: float) -> int:
        """Counts the slices that ``worker`` hosts or is to host."""
        hosted = sum(
            shard.worker == worker.incarnation and not self._is_vacant(shard, now)
            for shard in self._slices()
        )
        return hosted + sum(name == worker.name for name, _ in self._given.values())
