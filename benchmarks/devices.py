"""One worker with two devices beside two workers with one each, and one worker alone, on parts of
the CPU: rounds or batches per second, bytes and memory, for docs/devices.md.

    python -m benchmarks.devices --runs 3 --docs

Each run is ``coordinator up`` with one shard over TCP. Bytes are computed: the tensors of a push
and of a pull, times the number that a step of the whole cluster has of each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import ROOT, Cluster, RunFailed
from benchmarks.memory import MB, MemoryWatch
from benchmarks.payload import Payload, measure_payload
from benchmarks.report import say, write_section
from benchmarks.table import MISSING, markdown
from psrpc.files.run_paths import read_summary

PAGE = ROOT / "docs" / "devices.md"
AT_ONCE = 2
"""Micro-batches that are computed from the same parameters, where there are two devices."""

MODES: dict[str, tuple[str, ...]] = {
    "sync": ("mode=sync", f"replicas={AT_ONCE}"),
    "async": ("mode=async",),
}


@dataclass(frozen=True)
class Layout:
    """Processes and devices of one row. ``pulls`` and ``pushes`` are those of all workers for
    :data:`AT_ONCE` micro-batches."""

    name: str
    workers: int
    devices: int
    pulls: dict[str, int]
    pushes: int = AT_ONCE

    def nbytes(self, mode: str, payload: Payload) -> int:
        """Of tensors, for each micro-batch."""
        both = self.pulls[mode] * payload.pull_nbytes + self.pushes * payload.push_nbytes
        return both // AT_ONCE


LAYOUTS = (
    # One after the other: in sync mode of the same parameters.
    Layout("1 worker, 1 device", 1, 1, {"sync": 1, "async": 2}),
    Layout("2 workers, 1 device each", 2, 1, {"sync": 2, "async": 2}),
    Layout("1 worker, 2 devices", 1, 2, {"sync": 1, "async": 1}),
)


@dataclass(frozen=True)
class Sample:
    """One run: micro-batches per second, and the memory of its own (RssAnon) of all workers."""

    batches_per_s: float
    worker_mb: float


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    job = ROOT / "examples" / f"{options.job}.py"
    found: dict[tuple[str, str], list[Sample]] = {}
    for turn in range(options.runs):
        for mode in MODES:
            for layout in LAYOUTS:
                say(f"run {turn + 1}: {mode}, {layout.name}")
                try:
                    sample = measure(job, mode, layout, options.epochs)
                except RunFailed as error:
                    say(f"  missing: {error}")
                    continue
                say(f"  {sample}")
                found.setdefault((mode, layout.name), []).append(sample)
    text = table(found, measure_payload(job, 1, MODES["sync"]))
    sys.stdout.write(text)
    if options.docs:
        write_section("devices", text, PAGE)


def measure(job: Path, mode: str, layout: Layout, epochs: int) -> Sample:
    """Runs one row once. Raises RunFailed."""
    options = ["--intra-op-threads", "1", "--no-warm-start"]
    if layout.devices > 1:
        options += ["--devices", f"cpu:{layout.devices}"]
    settings = (*MODES[mode], f"epochs={epochs}")
    with (
        Cluster(
            job, workers=layout.workers, transport="tcp", settings=settings, options=options
        ) as cluster,
        MemoryWatch(lambda: _all(cluster, layout.workers)) as watch,
    ):
        cluster.wait()
        rate = read_summary(cluster.run_dir)["batches_per_s"]
        peaks = watch.peaks()
    return Sample(rate, sum(peak.anonymous for peak in peaks) / MB)


def _all(cluster: Cluster, workers: int) -> list[int]:
    found = cluster.processes("worker")
    return found if len(found) == workers else []


def table(found: dict[tuple[str, str], list[Sample]], payload: Payload) -> str:
    """Returns the table as markdown, with medians."""
    header = ("cluster", "micro-batches/s", "kB for each micro-batch", "MB of all workers")
    rows = []
    for mode in MODES:
        for layout in LAYOUTS:
            samples = found.get((mode, layout.name), [])
            rate = memory = MISSING
            if samples:
                rate = f"{statistics.median(s.batches_per_s for s in samples):.0f}"
                memory = f"{statistics.median(s.worker_mb for s in samples):.0f}"
            nbytes = layout.nbytes(mode, payload)
            rows.append((f"{mode}: {layout.name}", rate, f"{nbytes / 1e3:.0f}", memory))
    return markdown(header, rows) + "\n"


def parser() -> argparse.ArgumentParser:
    """The options of this command."""
    made = argparse.ArgumentParser(prog="benchmarks.devices", description=__doc__)
    made.add_argument("--job", default="mnist_dnn", help="an example; default: %(default)s")
    made.add_argument("--runs", type=int, default=3, help="of each row; default: %(default)s")
    made.add_argument("--epochs", type=int, default=2, help="default: %(default)s")
    made.add_argument("--docs", action="store_true", help="put the table into docs/devices.md")
    return made


if __name__ == "__main__":
    main()
