"""One coordinator, four shards and 64 workers that are real but for their gradients, on one
machine: at which step time does the cluster no longer keep up with its workers?

No tensor is large and nothing passes a network: what is measured is what the protocol costs in
processor time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.sleeping_cluster import SleepingCluster
from benchmarks.table import markdown

STEPS_S = (0.5, 0.2, 0.1, 0.05)
TARGET = 0.95
BATCH_SIZE = 10
"""Examples of a batch in ``benchmarks/jobs/sleeping.py``."""

WARMUP_S, SECONDS = 3.0, 8.0

WORKER, SHARD, COORDINATOR = "benchmarks.sleeping_worker", "pserver.cli", "coordinator.cli"


@dataclass(frozen=True, slots=True)
class Sleepers:
    """A measured cluster.

    Attributes:
        ideal: the part of the batches that workers which only sleep would do.
        us: microseconds of processor time: of worker and shard for an exchange of one with the
            other, of the coordinator for a batch.
    """

    mode: str
    step_s: float
    workers: int
    batches_per_s: float
    exchanges_per_s: float
    ideal: float
    us: dict[str, float]
    cores: float

    @property
    def row(self) -> list[str]:
        """Of :func:`sleepers_table`."""
        met = "met" if self.ideal >= TARGET else "**missed**"
        return [
            *(self.mode, f"{1000 * self.step_s:.0f}", f"{self.batches_per_s:.0f}"),
            *(f"{self.exchanges_per_s:.0f}", f"{100 * self.ideal:.1f} % ({met})"),
            *(f"{self.us[role]:.0f}" for role in (WORKER, SHARD, COORDINATOR)),
            f"{self.cores:.2f}",
        ]


def measure_sleepers(mode: str, step_s: float, workers: int, shards: int, apart: int) -> Sleepers:
    """Runs ``workers`` in ``apart`` processes. Raises RunFailed."""
    settings = [f"mode={mode}", *([f"replicas={workers}"] if mode == "sync" else [])]
    with SleepingCluster(
        settings,
        step_s / BATCH_SIZE,
        [1.0] * workers,
        shards=shards,
        together=-(-workers // apart),
    ) as cluster:
        rate = cluster.measure(WARMUP_S, SECONDS)
    batches_per_s = rate.examples_per_s / BATCH_SIZE
    exchanges_per_s = batches_per_s * shards
    calls = {WORKER: exchanges_per_s, SHARD: exchanges_per_s, COORDINATOR: batches_per_s}
    return Sleepers(
        mode=mode,
        step_s=step_s,
        workers=workers,
        batches_per_s=batches_per_s,
        exchanges_per_s=exchanges_per_s,
        ideal=batches_per_s * step_s / workers,
        us={role: 1e6 * rate.cores[role] / max(1.0, calls[role]) for role in calls},
        cores=sum(rate.cores.values()),
    )


def sweep(
    modes: Sequence[str], steps_s: Sequence[float], workers: int, shards: int, apart: int
) -> Iterator[Sleepers]:
    """Measures each mode with ever shorter steps, to the first that is too short. Raises
    RunFailed."""
    for mode in modes:
        for step_s in steps_s:
            found = measure_sleepers(mode, step_s, workers, shards, apart)
            sys.stderr.write(f"{' | '.join(found.row)}\n")
            yield found
            if found.ideal < TARGET:
                break


def sleepers_table(found: Sequence[Sleepers]) -> str:
    """Returns Markdown."""
    head = [
        *("mode", "step, ms", "batches/s", "exchanges/s", "of the ideal rate"),
        *("worker, µs an exchange", "shard, µs an exchange", "coordinator, µs a batch"),
        "all, cores",
    ]
    return markdown(head, [one.row for one in found])
