"""Many simulated workers and shards of one coordinator, and what they saw of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster import RunFailed
from benchmarks.processor import cpu_s, resident_mb
from benchmarks.scale.calls import CallBook, MemberCalls
from benchmarks.scale.process import CoordinatorProcess
from benchmarks.scale.shards import SimulatedShards
from benchmarks.scale.workers import SimulatedWorker
from psrpc.v1 import coordinator_pb2 as pb

WAVE = 100
"""Workers that start at once, after the first one has initialized the shards. All calls come from
one address here, which may have 256 of them under way, the shards' command streams included
(:data:`psrpc.net.limits.PEER_CALLS`); calls of members that wait for work count."""

FIRST_BATCH_S = 0.2
BEGIN_S = 120.0
TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures of a measured time.

    Attributes:
        batches_per_s: those that workers computed and that the coordinator has in its books or
            gets with the next call.
        coordinator_cpu: cores that it used.
        load_cpu: cores that the load generator used, which has one.
        took_s: by method, the seconds of its calls, sorted.
    """

    seconds: float
    batches_per_s: float
    coordinator_cpu: float
    load_cpu: float
    resident_mb: float
    calls: Counter[str]
    failed: Counter[str]
    took_s: dict[str, list[float]]

    def per_s(self, method: str) -> float:
        """Returns calls of ``method`` per second."""
        return self.calls[method] / self.seconds

    def quantile_ms(self, method: str, at: float) -> float:
        """Returns a quantile of the milliseconds of its calls, as the caller measured."""
        taken = self.took_s[method]
        return 1000 * taken[min(len(taken) - 1, int(at * len(taken)))] if taken else 0.0

    @property
    def cpu_us_per_batch(self) -> float:
        """The coordinator's, heartbeats included."""
        return 1e6 * self.coordinator_cpu / self.batches_per_s if self.batches_per_s else 0.0


class Crowd:
    """The members of one job. One event loop uses it."""

    def __init__(self, coordinator: CoordinatorProcess, address: str, shards: int) -> None:
        self.book = CallBook()
        self.shards = SimulatedShards(address, shards, self.book)
        self.workers: list[SimulatedWorker] = []
        self.coordinator = coordinator
        self._address = address
        self._lives: list[asyncio.Task[None]] = []

    async def start(self, workers: int, batch_s: float) -> None:
        """Starts all shards, and the workers wave after wave. Raises RunFailed."""
        calls = MemberCalls(self._address, self.book)
        job: pb.GetJobResponse = await calls.persist("GetJob", pb.GetJobRequest())
        await calls.close()
        self.shards.start()
        while len(self.workers) < workers:
            wave = [
                SimulatedWorker(self._address, self.shards, job, self.book)
                for _ in range(min(WAVE, workers - len(self.workers)) if self.workers else 1)
            ]
            for worker in wave:
                worker.batch_s = FIRST_BATCH_S
            self.workers += wave
            self._lives += [asyncio.create_task(worker.run()) for worker in wave]
            await self._until_all_work(wave)
        self.pace(batch_s)

    def pace(self, batch_s: float) -> None:
        """Makes all workers compute a batch in so many seconds from now on."""
        for worker in self.workers:
            worker.batch_s = batch_s

    async def stop(self) -> None:
        """Ends all members, without a word to the coordinator."""
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        await self.shards.stop()

    @property
    def batches(self) -> int:
        """Number of batches that all shards have."""
        return self.shards.version

    async def measure(self, warmup_s: float, seconds: float) -> Seen:
        """Looks at the coordinator for a while. Raises RunFailed."""
        await asyncio.sleep(warmup_s)
        self.book.clear()
        pid = self.coordinator.pid
        began, batches, own = time.monotonic(), self.batches, time.process_time()
        cpu = cpu_s(pid)
        await asyncio.sleep(seconds)
        self._check()
        took = time.monotonic() - began
        book = self.book
        return Seen(
            seconds=took,
            batches_per_s=(self.batches - batches) / took,
            coordinator_cpu=(cpu_s(pid) - cpu) / took,
            load_cpu=(time.process_time() - own) / took,
            resident_mb=resident_mb(pid),
            calls=Counter(book.calls),
            failed=Counter(book.failed),
            took_s={method: sorted(taken) for method, taken in book.took_s.items()},
        )

    async def until_batches(self, batches: int) -> None:
        """Waits until shards have so many. Raises RunFailed."""
        while self.batches < batches:
            self._check()
            await asyncio.sleep(TICK_S)

    async def until_leased(self) -> float:
        """Waits for the first lease of training work since ``book.leased`` was cleared; returns
        when it came. Raises RunFailed."""
        until = time.monotonic() + BEGIN_S
        while self.book.leased is None:
            self._check()
            if time.monotonic() > until:
                raise RunFailed(f"no worker gets work: {self.coordinator.said()}")
            await asyncio.sleep(TICK_S / 10)
        return self.book.leased

    async def _until_all_work(self, workers: Sequence[SimulatedWorker]) -> None:
        until = time.monotonic() + BEGIN_S
        while not all(worker.batches for worker in workers):
            self._check()
            if time.monotonic() > until:
                idle = sum(not worker.batches for worker in workers)
                raise RunFailed(f"{idle} workers got no work: {self.coordinator.said()}")
            await asyncio.sleep(TICK_S)

    def _check(self) -> None:
        self.coordinator.check()
        for life in self._lives:
            if life.done():
                error = life.exception()
                raise RunFailed(f"a worker has ended: {error!r}")
