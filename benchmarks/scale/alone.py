"""The coordinator alone: a thousand workers and a hundred shards that speak the real calls, on the
other core. Nothing here passes a network: latency, bandwidth and lost packets are not measured."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from benchmarks.processor import confine, resident_mb
from benchmarks.scale.crowd import Crowd, Seen
from benchmarks.scale.process import CoordinatorProcess
from benchmarks.table import markdown

BATCH_S = (0.5, 0.25, 0.18, 0.12)
"""Seconds of a batch: with a thousand workers 2,000 to 8,000 batches/s are wanted."""

RATE_TARGET = 5000.0
P99_AT, P99_TARGET_MS = 2000.0, 50.0
FLAT_FROM, FLAT_TO, FLAT_TARGET = 100_000, 1_000_000, 0.1
RESTART_TARGET_S = 2.0

WARMUP_S, SECONDS = 5.0, 10.0
LOAD_CORE = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory and size of the ledger after a number of batches."""

    batches: int
    resident_mb: float
    ledger_kb: float


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds from the kill of a coordinator until the next one serves, and until a worker has the
    first lease of it."""

    batches: int
    serves_s: float
    leases_s: float


@asynccontextmanager
async def crowd_of(workers: int, shards: int, batch_s: float) -> AsyncIterator[Crowd]:
    """Starts a coordinator with its members, each side on a core of its own. Raises RunFailed."""
    with CoordinatorProcess(shards) as coordinator:
        crowd = Crowd(coordinator, coordinator.start(), shards)
        confine(0, LOAD_CORE)
        try:
            await crowd.start(workers, batch_s)
            yield crowd
        finally:
            await crowd.stop()


async def rates(crowd: Crowd, batch_s: Sequence[float]) -> list[tuple[float, Seen]]:
    """Measures with workers that are ever faster. Raises RunFailed."""
    found = []
    for seconds in batch_s:
        crowd.pace(seconds)
        seen = await crowd.measure(WARMUP_S, SECONDS)
        found.append((seconds, seen))
        sys.stderr.write(f"{' | '.join(row_of(len(crowd.workers), seconds, seen))}\n")
    return found


async def memory(crowd: Crowd, batches: Sequence[int]) -> list[Memory]:
    """Reads the coordinator's memory each time that so many batches are done. Raises RunFailed."""
    found = []
    for count in batches:
        await crowd.until_batches(count)
        coordinator = crowd.coordinator
        now = Memory(crowd.batches, resident_mb(coordinator.pid), coordinator.ledger_bytes() / 1024)
        sys.stderr.write(f"{now}\n")
        found.append(now)
    return found


async def restart(crowd: Crowd) -> Restart:
    """Kills the coordinator and starts it again, while shards and workers stay. Raises
    RunFailed."""
    batches = crowd.batches
    crowd.coordinator.kill()
    began = time.monotonic()
    crowd.book.leased = None
    await asyncio.to_thread(crowd.coordinator.start)
    serves_s = time.monotonic() - began
    leased = await crowd.until_leased()
    found = Restart(batches, serves_s, leased - began)
    sys.stderr.write(f"{found}\n")
    return found


def row_of(workers: int, batch_s: float, seen: Seen) -> list[str]:
    """Returns a row of :func:`rates_table`."""
    return [
        f"{workers / batch_s:.0f}",
        f"{seen.batches_per_s:.0f}",
        f"{seen.per_s('LeaseWork'):.0f}",
        f"{seen.per_s('HeartbeatWorker') + seen.per_s('HeartbeatShard'):.0f}",
        f"{seen.coordinator_cpu:.2f}",
        f"{seen.cpu_us_per_batch:.0f}",
        f"{seen.quantile_ms('LeaseWork', 0.5):.1f}",
        f"{seen.quantile_ms('LeaseWork', 0.99):.1f}",
        f"{seen.quantile_ms('HeartbeatWorker', 0.99):.1f}",
        f"{seen.load_cpu:.2f}",
        f"{sum(seen.failed.values())}",
    ]


def rates_table(workers: int, found: Sequence[tuple[float, Seen]]) -> str:
    """Returns Markdown: a row for each speed of the workers."""
    head = [
        *("wanted batches/s", "batches/s", "leases/s", "heartbeats/s", "coordinator, cores"),
        *("µs of CPU a batch", "lease p50, ms", "p99, ms", "heartbeat p99, ms"),
        *("load, cores", "failed calls"),
    ]
    return markdown(head, [row_of(workers, batch_s, seen) for batch_s, seen in found])


def verdicts(
    found: Sequence[tuple[float, Seen]], memories: Sequence[Memory], again: Restart | None
) -> str:
    """Returns Markdown: each target, what was measured, and whether that meets it."""
    rows = []
    if found:
        best = max(seen.batches_per_s for _, seen in found)
        rows.append(_verdict("batches/s on a core", f"≥ {RATE_TARGET:.0f}", best, RATE_TARGET))
        _, slow = min(found, key=lambda one: abs(one[1].batches_per_s - P99_AT))
        p99 = slow.quantile_ms("LeaseWork", 0.99)
        what = f"p99 of a lease at {slow.batches_per_s:.0f} batches/s, ms"
        rows.append(_verdict(what, f"≤ {P99_TARGET_MS:.0f}", -p99, -P99_TARGET_MS))
    if len(memories) > 1:
        grown = abs(memories[-1].resident_mb / memories[0].resident_mb - 1)
        what = f"memory from {memories[0].batches} to {memories[-1].batches} batches, grown by"
        rows.append(_verdict(what, f"≤ {FLAT_TARGET}", -grown, -FLAT_TARGET))
    if again is not None:
        what = f"restart with {again.batches} batches done, s"
        rows.append(_verdict(what, f"≤ {RESTART_TARGET_S:.0f}", -again.leases_s, -RESTART_TARGET_S))
    return markdown(["what", "target", "measured", ""], rows)


def _verdict(what: str, target: str, value: float, least: float) -> list[str]:
    met = "met" if value >= least else "**missed**"
    return [what, target, f"{abs(value):.3g}" if abs(value) < 1000 else f"{value:.0f}", met]


async def measure_alone(
    workers: int, shards: int, batch_s: Sequence[float], batches: Sequence[int], restarts: bool
) -> tuple[str, dict[str, object]]:
    """Returns the tables of the coordinator alone, and the same as plain values. Raises
    RunFailed."""
    async with crowd_of(workers, shards, batch_s[0]) as crowd:
        found = await rates(crowd, batch_s)
        memories = await memory(crowd, batches)
        again = await restart(crowd) if restarts else None
    text = f"{rates_table(workers, found)}\n{verdicts(found, memories, again)}"
    plain: dict[str, object] = {
        "rates": [{"batch_s": batch_s, **asdict(seen), "took_s": {}} for batch_s, seen in found],
        "memory": [asdict(one) for one in memories],
        "restart": asdict(again) if again else None,
    }
    return text, plain
