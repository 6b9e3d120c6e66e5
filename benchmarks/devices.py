"""One worker with two devices beside two workers with one each, and one worker alone, on parts of
the CPU: rounds or batches per second, bytes and memory, for docs/devices.md.

    python -m benchmarks.devices --runs 3 --docs
    python -m benchmarks.devices --split --runs 3 --docs

With ``--split`` a model over two devices in place of that: examples/mnist_devices.py cut by layers,
by columns, and on one device.

Each run is ``coordinator up`` with one shard over TCP. Bytes are computed: the tensors of a push
and of a pull, times the number that a step of the whole cluster has of each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    # The learning rate of docs/reproductions.md.
    "async": ("mode=async", "optimizer.learning_rate=0.003"),
}


@dataclass(frozen=True)
class Layout:
    """Processes and devices of one row. ``pulls`` and ``pushes`` are those of all workers for
    :data:`AT_ONCE` micro-batches; ``pulls`` has the modes that the row is measured in."""

    name: str
    workers: int
    devices: int
    pulls: dict[str, int]
    pushes: int = AT_ONCE
    settings: tuple[str, ...] = ()

    def nbytes(self, mode: str, payload: Payload) -> int:
        """Of tensors, for each micro-batch."""
        both = self.pulls[mode] * payload.pull_nbytes + self.pushes * payload.push_nbytes
        return both // AT_ONCE


LAYOUTS = (
    # One after the other: in sync mode of the same parameters.
    Layout("1 worker, 1 device", 1, 1, {"sync": 1, "async": 2}),
    Layout("2 workers, 1 device each", 2, 1, {"sync": 2, "async": 2}),
    Layout("1 worker, 2 devices", 1, 2, {"sync": 1, "async": 1}),
    Layout("1 worker, 2 devices, `sum_devices`", 1, 2, {"async": 1}, 1, ("sum_devices=true",)),
)


def rows(modes: Iterable[str]) -> list[tuple[str, Layout]]:
    """Returns the rows of the table, of these modes."""
    return [(mode, layout) for mode in modes for layout in LAYOUTS if mode in layout.pulls]


CUTS = {
    "none": "one device",
    "layers": "layers: hidden 4, 5 and the digits on the second",
    "columns": "columns",
}
"""The rows of ``--split``, by the setting ``cut`` of the example."""


@dataclass(frozen=True)
class Sample:
    """One run: micro-batches per second, and the memory of its own (RssAnon) of all workers."""

    batches_per_s: float
    worker_mb: float


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    if options.split:
        text = split_table(options.runs, options.epochs)
        sys.stdout.write(text)
        if options.docs:
            write_section("split", text, PAGE)
        return
    job = ROOT / "examples" / f"{options.job}.py"
    found: dict[tuple[str, str], list[Sample]] = {}
    for turn in range(options.runs):
        for mode, layout in rows(options.mode or MODES):
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
    settings = (*MODES[mode], *layout.settings, f"epochs={epochs}")
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
    lines = []
    for mode, layout in rows(MODES):
        samples = found.get((mode, layout.name), [])
        rate = memory = MISSING
        if samples:
            rate = f"{statistics.median(s.batches_per_s for s in samples):.0f}"
            memory = f"{statistics.median(s.worker_mb for s in samples):.0f}"
        nbytes = layout.nbytes(mode, payload)
        lines.append((f"{mode}: {layout.name}", rate, f"{nbytes / 1e3:.0f}", memory))
    return markdown(header, lines) + "\n"


def split_table(runs: int, epochs: int) -> str:
    """Trains each cut of the example so often; returns the table as markdown, with medians."""
    path = ROOT / "examples" / "mnist_devices.py"
    found: dict[str, list[tuple[float, float]]] = {cut: [] for cut in CUTS}
    for turn in range(runs):
        for cut in CUTS:
            say(f"run {turn + 1}: {cut}")
            devices = () if cut == "none" else ("--devices", "cpu:2")
            settings, options = (f"cut={cut}", f"epochs={epochs}"), ("--no-warm-start", *devices)
            try:
                with Cluster(path, workers=1, settings=settings, options=options) as cluster:
                    cluster.wait()
                    summary = read_summary(cluster.run_dir)
            except RunFailed as error:
                say(f"  missing: {error}")
                continue
            found[cut].append((summary["eval"]["accuracy"], summary["examples_per_s"]))
    header = (
        "cut",
        "accuracy",
        "examples/s",
        "activations and their gradients, kB a step",
        "parameters and their gradients on the second device, kB a step",
    )
    lines = []
    for cut, name in CUTS.items():
        accuracy = rate = MISSING
        if found[cut]:
            accuracies, rates = zip(*found[cut], strict=True)
            accuracy = f"{statistics.median(accuracies):.4f}"
            rate = f"{statistics.median(rates):.0f}"
        between = [f"{nbytes / 1e3:.0f}" for nbytes in split_nbytes(path, cut)]
        lines.append((name, accuracy, rate, *between))
    return markdown(header, lines) + "\n"


def split_nbytes(path: Path, cut: str) -> tuple[int, int]:
    """Returns the bytes of a step that pass between the devices of a chain of dense layers, and
    those of the parameters and gradients of the second device."""
    # These import TensorFlow, which the rest need not.
    from worker.job.loader import load_job
    from worker.model.placement import placed_layers

    job = load_job(path, [f"cut={cut}"]).job
    model: Any = job.model()
    places = placed_layers(model, job.devices) if job.devices is not None else []
    placed = {layer.name: index for layer, index in places}
    activations = parameters = here = units = 0
    for layer in model.layers:
        inputs, units = layer.kernel.shape
        at = placed.get(layer.name, 0)
        # The data has no gradient.
        both = 1 if layer is model.layers[0] else 2
        if at is None:
            second = units - units // 2
            activations += both * inputs + 2 * second
            parameters += 2 * (inputs + 1) * second
            continue
        if at != here:
            activations += both * inputs
        if at:
            parameters += 2 * (inputs + 1) * units
        here = at
    if here:
        # The loss is on the first device.
        activations += 2 * units
    return 4 * job.batch_size * activations, 4 * parameters


def parser() -> argparse.ArgumentParser:
    """The options of this command."""
    made = argparse.ArgumentParser(prog="benchmarks.devices", description=__doc__)
    made.add_argument("--job", default="mnist_dnn", help="an example; default: %(default)s")
    made.add_argument("--runs", type=int, default=3, help="of each row; default: %(default)s")
    made.add_argument("--epochs", type=int, default=2, help="default: %(default)s")
    made.add_argument("--mode", action="append", choices=MODES, help="one of them; default: all")
    made.add_argument("--split", action="store_true", help="a model over two devices")
    made.add_argument("--docs", action="store_true", help="put the table into docs/devices.md")
    return made


if __name__ == "__main__":
    main()
