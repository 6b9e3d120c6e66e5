"""Ways for dense gradients on two hosts, over the link of :mod:`benchmarks.link`: shards on one
host or on both, slices in the workers, TensorFlow's ring, and PyTorch's DDP.

    python -m benchmarks.sync_hosts [--runs 1] [--only WORKLOAD] [--peers DIR] [--readme]

Each host has a worker, and a round two micro-batches. No worker shares memory with a shard, so that
what is on one host is reached as over a network, but for the slice in a worker itself.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import RunFailed, write_job
from benchmarks.hosts import PORT, WARMUP, on_hosts, rate_of, run_peer_parts
from benchmarks.link import HOSTS, Link, Processes
from benchmarks.peers import Figure
from benchmarks.steps import TooShort, read_steps, step_ms
from benchmarks.table import markdown, number
from benchmarks.workloads import DENSE, JOBS, Dense
from psrpc.ops.process import module_command

STEPS = 24
"""Of each worker, in dense workloads."""

WORKLOADS = ("dense_1x64MB", "mnist_dnn")


@dataclass(frozen=True)
class Way:
    """Where parameters are updated: on ``shards``, a host each, or in ``slices`` of workers."""

    shards: Sequence[str] = ()
    slices: int = 0

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of the job."""
        hosted = ("dense=allreduce", f"slices={self.slices}") if self.slices else ()
        return (*hosted, "engine=numpy", "mode=sync", "replicas=2", "epochs=1")


WAYS = {
    "one shard": Way(shards=("near",)),
    "a shard on each host": Way(shards=("near", "far")),
    "one slice": Way(slices=1),
    "a slice on each host": Way(slices=2),
}

PEERS = {"TF ring": "ring", "PyTorch DDP": "ddp"}

MISSING = "PyTorch's script for mnist_dnn starts all processes at 127.0.0.1."


@dataclass(frozen=True)
class WaySample:
    """One run of one of :data:`WAYS` or :data:`PEERS`."""

    run: int
    workload: str
    way: str
    figure: Figure


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints the table; 0 also where there can be no hosts."""
    return on_hosts("sync-hosts", __doc__ or "", WORKLOADS, measure, table, argv)


def measure(run: int, workload: str, link: Link, peers: Path) -> Iterator[WaySample]:
    """Runs everything once, in the opposite order in every second run."""
    ways = [*WAYS, *(peer for peer in PEERS if peer != "PyTorch DDP" or workload in DENSE)]
    for way in ways if run % 2 else reversed(ways):
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
            try:
                with Processes(link, Path(folder)) as processes:
                    if way in PEERS:
                        parts = [("far", f"{PEERS[way]}1"), ("near", f"{PEERS[way]}0")]
                        figure = run_peer_parts(parts, f"{workload}_2w", processes, peers)
                    else:
                        figure = _run_ours(WAYS[way], workload, processes, Path(folder))
            except (RunFailed, TooShort) as error:
                figure = Figure(miss=str(error))
        yield WaySample(run, workload, way, figure)


def _run_ours(way: Way, workload: str, processes: Processes, folder: Path) -> Figure:
    job = JOBS / f"{workload}.py"
    if workload in DENSE:
        dense = DENSE[workload]
        job = write_job(folder / "job.py", Dense(dense.count, dense.shape, 2 * STEPS))
    address = f"{HOSTS['near']}:{PORT}"
    there = ("--coordinator", address, "--insecure", "--die-with-parent")
    settings = [word for each in way.settings for word in ("--set", each)]
    serve = ("serve", "--job", str(job), "--run-dir", str(folder / "run"))
    shards = ("--shards", str(len(way.shards) or way.slices), "--bind", address, "--insecure")
    served = (*serve, *shards, "--die-with-parent", "--set", "checkpoint_every=1000000000")
    processes.start("near", module_command("coordinator.cli", *served, *settings))
    for shard, host in enumerate(way.shards):
        started = ("serve", "--shard", str(shard), *there)
        processes.start(host, module_command("pserver.cli", *started))
    workers = []
    for host in HOSTS:
        times = ("--step-times", str(folder / "steps" / f"{host}.csv"), "--gpu", "none")
        command = module_command("worker.cli", "run", *there, "--no-shm", *times)
        workers.append(processes.start(host, command))
    processes.wait(workers)
    return rate_of(step_ms(read_steps(folder / "steps"), WARMUP), len(workers))


def table(samples: Sequence[WaySample]) -> str:
    """Returns markdown: rates, and what is missing and why."""
    names = [*WAYS, *PEERS]
    rows = [
        [workload, *(number(_median(samples, workload, way)) for way in names)]
        for workload in dict.fromkeys(sample.workload for sample in samples)
    ]
    misses = {f"- {s.workload}, {s.way}: {s.figure.miss}" for s in samples if s.figure.miss}
    parts = [
        "Micro-batches per second of both workers, medians.",
        markdown(["workload", *names], rows),
        "\n".join(["Missing:\n", *sorted(misses), f"- {MISSING}"]),
    ]
    return "\n\n".join(parts) + "\n"


def _median(samples: Sequence[WaySample], workload: str, way: str) -> float | None:
    found = [
        sample.figure.steps_per_s or 1e3 / sample.figure.ms
        for sample in samples
        if (sample.workload, sample.way) == (workload, way) and sample.figure.ms
    ]
    return statistics.median(found) if found else None


if __name__ == "__main__":
    sys.exit(main())
