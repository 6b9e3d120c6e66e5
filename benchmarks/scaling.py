"""Time per step against the number of variables, parameters, shards and workers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.steps import TooShort, parts_ms, step_ms
from benchmarks.table import MISSING, OURS, markdown, number
from benchmarks.workloads import Dense, Transport

MIB = 1 << 20
FLAT = 0.2
TRANSPORTS: tuple[Transport, ...] = ("shm", "tcp")


def vectors(nbytes: int, count: int = 1, workers: int = 1) -> Dense:
    """``nbytes`` of parameters in ``count`` variables, and steps for some seconds of work."""
    steps = workers * max(24, min(300, 3 * 1024 * MIB // nbytes))
    return Dense(count, (nbytes // 4 // count,), steps)


@dataclass(frozen=True)
class Point:
    """One cluster of a sweep; ``label`` is what the sweep varies."""

    sweep: str
    label: str
    dense: Dense
    shards: int = 1
    workers: int = 1


POINTS = (
    *(Point("variables", f"{n}", vectors(16_000_000, n)) for n in (1, 10, 100, 1000)),
    *(
        Point("parameters", f"{n} MB" if n < 1024 else "1 GB", vectors(n * MIB), shards=2)
        for n in (1, 4, 16, 64, 256, 1024)
    ),
    *(Point("shards", f"{n}", vectors(64 * MIB), shards=n) for n in (1, 2, 3, 4)),
    *(Point("workers", f"{n}", vectors(16 * MIB, 1, n), workers=n) for n in (1, 2, 3, 4)),
)

TITLES = {
    "variables": "Number of variables, 16 MB in all, 1 shard, 1 worker",
    "parameters": "Parameters, 1 variable, 2 shards, 1 worker",
    "shards": "Shards, 64 MB, 1 variable, 1 worker",
    "workers": "Workers, 16 MB, 1 variable, 1 shard; milliseconds of each worker's step",
}


@dataclass(frozen=True)
class PointSample:
    """One run of one point; ``ms`` is None where it gave no figure, and ``miss`` says why."""

    sweep: str
    label: str
    transport: Transport
    run: int
    ms: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    miss: str = ""


def measure(sweep: str, runs: int) -> Iterator[PointSample]:
    """All points of a sweep, over and over, so that a slow minute does not fall on one of them."""
    for run in range(1, runs + 1):
        for point in POINTS:
            for transport in TRANSPORTS:
                if point.sweep == sweep:
                    yield run_point(point, transport, run)


def run_point(point: Point, transport: Transport, run: int) -> PointSample:
    warmup = point.dense.steps // point.workers // 3
    where = (point.sweep, point.label, transport, run)
    try:
        with Cluster(
            point.dense, shards=point.shards, workers=point.workers, transport=transport
        ) as cluster:
            workers = cluster.wait()
        return PointSample(*where, step_ms(workers, warmup), parts_ms(workers, warmup))
    except (RunFailed, TooShort) as error:
        return PointSample(*where, miss=str(error))


def table(samples: Sequence[PointSample]) -> str:
    """Markdown of one sweep: medians over the runs, and what is missing and why."""
    sweep = samples[0].sweep
    labels = list(dict.fromkeys(sample.label for sample in samples))
    medians = {
        (label, transport): _median(
            s.ms for s in samples if (s.label, s.transport) == (label, transport)
        )
        for label in labels
        for transport in TRANSPORTS
    }
    rows = [[label, *(number(medians[label, t]) for t in TRANSPORTS)] for label in labels]
    lines = [
        f"{TITLES[sweep]}; milliseconds a step, medians.",
        "",
        markdown([sweep, *(OURS[transport] for transport in TRANSPORTS)], rows),
    ]
    if sweep == "variables":
        lines += ["", f"Flat within ±{FLAT:.0%}, compared with one variable:", ""]
        lines += [
            f"- {OURS[t]} {flatness([medians[label, t] for label in labels])}" for t in TRANSPORTS
        ]
    misses = dict.fromkeys(f"- {s.label}, {OURS[s.transport]}: {s.miss}" for s in samples if s.miss)
    return "\n".join([*lines, *(["", "Missing:", ""] if misses else []), *misses]) + "\n"


def flatness(ms: Sequence[float | None]) -> str:
    """Whether the others cost as much as the first."""
    found = [value for value in ms if value is not None]
    if len(found) < len(ms) or not found:
        return MISSING
    ratios = [value / found[0] for value in found]
    met = min(ratios) >= 1 - FLAT and max(ratios) <= 1 + FLAT
    return f"{min(ratios):.2f} … {max(ratios):.2f} ({'met' if met else '**missed**'})"


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
