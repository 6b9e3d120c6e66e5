"""Consistency modes beside each other and beside synchronous peers, a part of ``make bench``.

Ratios are taken within a run, and medians over the runs. A rate counts the micro-batches of all
workers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import ROOT, Cluster, RunFailed
from benchmarks.peers import Figure, run_peer
from benchmarks.steps import TooShort, steps_per_s
from benchmarks.table import markdown, number, verdict
from benchmarks.workloads import JOBS, MNIST, WARMUP

LEAST_S = 5.0
"""A rate over less than this says little."""

HYBRID = ("sync", "allreduce")
"""For jobs with tables: all on shards, or rows alone."""

OURS = ("async", "ssp", "sync", "sync8", "allreduce")

PEERS = {"tf_single": "one process", "tf_mwms": "TF MWMS", "torch_ddp": "PyTorch DDP"}

NAMES = {
    "async": "async",
    "ssp": "ssp, s = 2",
    "sync": "sync, K = workers",
    "sync8": "sync, K = 8",
    "allreduce": "all-reduce, K = workers",
    **PEERS,
}


@dataclass(frozen=True)
class Row:
    """A workload with so many workers and shards, and the systems that train it."""

    workload: str
    workers: int
    shards: int = 1
    epochs: int = 1
    systems: tuple[str, ...] = OURS
    more: tuple[str, ...] = ()
    """Further settings of the job."""

    @property
    def name(self) -> str:
        """As the table calls it."""
        return f"{self.workload}, {self.workers} × {self.shards}"

    @property
    def job(self) -> Path:
        """The job file that trains it here."""
        own = ROOT / "examples" / f"{self.workload}.py"
        return own if own.exists() and self.workload not in MNIST else JOBS / f"{self.workload}.py"

    def settings(self, system: str) -> tuple[str, ...]:
        """The settings of one of our modes."""
        modes = {
            "async": ("mode=async",),
            "ssp": ("mode=ssp", "staleness=2"),
            "sync": ("mode=sync", f"replicas={self.workers}"),
            "sync8": ("mode=sync", "replicas=8"),
            # As many slices as shards, which have the rows if there are any.
            "allreduce": (
                *("mode=sync", f"replicas={self.workers}"),
                *("dense=allreduce", f"slices={self.shards}", "engine=numpy"),
            ),
        }
        return (*modes[system], f"epochs={self.epochs}", *self.more)

    def case(self, system: str) -> str:
        """The workload as the script of a peer calls it."""
        return f"{self.workload}_{'single' if system == 'tf_single' else f'{self.workers}w'}"


ROWS = (
    Row("mnist_dnn", 1, epochs=3, systems=("tf_single", "async", "sync", "sync8")),
    Row("mnist_dnn", 2, epochs=4, systems=(*OURS, "tf_mwms", "torch_ddp")),
    Row("mnist_dnn", 2, shards=2, epochs=4),
    Row("mnist_sigmoid", 2, epochs=12, systems=(*OURS, "tf_mwms", "torch_ddp")),
    Row("mnist_cnn", 2, epochs=3),
    Row(
        "dense_1x64MB", 2, epochs=3, systems=("async", "sync", "allreduce", "tf_mwms", "torch_ddp")
    ),
    Row("dense_1x64MB", 2, shards=2, epochs=3, systems=("sync", "allreduce")),
    Row("rows_and_64MB", 2, epochs=3, systems=HYBRID),
    Row("rows_and_64MB", 2, shards=2, epochs=3, systems=HYBRID),
    Row("movielens", 2, epochs=40, systems=HYBRID, more=("network=towers", "data=synthetic")),
)

TARGETS: dict[tuple[str, str], float] = {
    ("sync", "async"): 0.85,
    ("sync8", "async"): 0.95,
    ("ssp", "async"): 0.9,
    ("async", "tf_single"): 0.75,
    ("sync", "tf_mwms"): 1.0,
    ("sync", "torch_ddp"): 1.0,
    ("allreduce", "tf_mwms"): 1.0,
    ("allreduce", "torch_ddp"): 1.0,
}
"""Of pairs of systems, the least ratio of the first one's rate to the second one's."""

ALONE = 0.8
"""In place of the target of sync over async for one worker."""


@dataclass(frozen=True)
class Measured:
    """One figure of one run."""

    run: int
    row: str
    system: str
    figure: Figure


def measure_row(run: int, row: Row, peers: Path) -> Iterator[Measured]:
    """Runs the systems of ``row``, in the opposite order in every second run."""
    for system in row.systems if run % 2 else reversed(row.systems):
        yield Measured(run, row.name, system, measure(row, system, peers))


def measure(row: Row, system: str, peers: Path) -> Figure:
    """Runs one system once."""
    if system in PEERS:
        return run_peer(peers, system, row.case(system))
    try:
        with Cluster(
            row.job,
            shards=row.shards,
            workers=row.workers,
            settings=row.settings(system),
            # Nor do the peers encrypt anything.
            options=("--insecure",),
        ) as cluster:
            rate = steps_per_s(cluster.wait(), WARMUP, LEAST_S)
    except (RunFailed, TooShort) as error:
        return Figure(miss=str(error))
    return Figure(1e3 / rate, rate)


def table(measured: Sequence[Measured], rows: Sequence[Row]) -> str:
    """Returns markdown: rates, ratios beside their targets, and what is missing and why."""
    rates = {
        (one.row, one.system, one.run): one.figure.steps_per_s
        for one in measured
        if one.figure.steps_per_s
    }
    lines, ratios = [], []
    for row in rows:
        cells = []
        for system in NAMES:
            found = [rate for (r, s, _), rate in rates.items() if (r, s) == (row.name, system)]
            cells.append(number(statistics.median(found) if found else None))
        lines.append([row.name, *cells])
        for (system, other), target in TARGETS.items():
            if system in row.systems and other in row.systems:
                least = ALONE if (system, other, row.workers) == ("sync", "async", 1) else target
                ratio = _ratio(rates, row.name, system, other)
                pair = f"{NAMES[system]} ÷ {NAMES[other]}"
                ratios.append([f"{row.name}: {pair}", verdict(ratio, least)])
    misses = {(one.row, one.system, one.figure.miss) for one in measured if one.figure.miss}
    missing = [f"- {row}, {NAMES[system]}: {why}" for row, system, why in sorted(misses)]
    parts = [
        "Micro-batches per second of all workers (workers × shards), medians.",
        markdown(["workload", *NAMES.values()], lines),
        markdown(["ratio", "median"], ratios),
    ]
    if missing:
        parts.append("Missing:\n\n" + "\n".join(missing))
    return "\n\n".join(parts) + "\n"


def _ratio(
    rates: dict[tuple[str, str, int], float], row: str, system: str, other: str
) -> float | None:
    """Returns the median over the runs that have both."""
    runs = {run for name, _, run in rates if name == row}
    pairs = [(rates.get((row, system, run)), rates.get((row, other, run))) for run in runs]
    found = [first / second for first, second in pairs if first and second]
    return statistics.median(found) if found else None
