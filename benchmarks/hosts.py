"""Ours beside TensorFlow on two hosts, over a link of 1 Gbit/s and 1 ms there and back.

    python -m benchmarks.hosts [--runs 1] [--only CASE] [--peers DIR] [--json FILE] [--readme]

Two network namespaces are the hosts: coordinator and shard are on one, the worker on the other; of
two workers each host has one. Needs root, and says so otherwise.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import ROOT, RunFailed, write_job
from benchmarks.link import HOSTS, Link, Processes, why_no_hosts
from benchmarks.peers import Figure, read_figure
from benchmarks.report import SampleT, add_arguments, publish, say
from benchmarks.steps import TooShort, read_steps, step_ms
from benchmarks.table import markdown, number
from benchmarks.workloads import DENSE, JOBS, Dense
from psrpc.ops.process import module_command

WARMUP = 4
PORT = 5000

ENCODINGS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("wire_dtype=bfloat16",),
    "float16": ("wire_dtype=float16",),
    "int8": ("compression=int8",),
    "bfloat16 + int8": ("wire_dtype=bfloat16", "compression=int8"),
}
"""How tensors of ours travel."""


@dataclass(frozen=True)
class HostCase:
    """A workload on two hosts.

    Attributes:
        steps: of ours, of each worker.
        peer: the case of the peer's script.
    """

    name: str
    workload: str
    steps: int
    peer: str
    sync: bool = False

    @property
    def nbytes(self) -> int | None:
        """Of the variables, of dense cases."""
        return DENSE[self.workload].nbytes if self.workload in DENSE else None

    @property
    def workers(self) -> tuple[str, ...]:
        """The hosts with a worker."""
        return ("far", "near") if self.sync else ("far",)

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that make it as long, and how gradients are combined."""
        mode = ("mode=sync", f"replicas={len(self.workers)}") if self.sync else ("mode=async",)
        return (*mode, "epochs=1", "checkpoint_every=1000000000")

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """Host and part of each process of the peer; the last one prints the figure."""
        if self.sync:
            return (("far", "ring1"), ("near", "ring0"))
        return (("near", "ps"), ("far", "worker"), ("near", "chief"))


CASES = (
    HostCase("dense_1x64MB, async", "dense_1x64MB", 16, "dense_1x64MB"),
    HostCase("dense_256x16KB, async", "dense_256x16KB", 100, "dense_256x16KB"),
    HostCase("mnist_dnn, async", "mnist_dnn", 0, "mnist_dnn_1w"),
    HostCase("mnist_dnn, sync, 2 workers", "mnist_dnn", 0, "mnist_dnn_2w", sync=True),
)

PYTORCH = "PyTorch's scripts are missing: they start all processes at 127.0.0.1."


@dataclass(frozen=True)
class HostSample:
    """One run of one system.

    Attributes:
        who: one of :data:`ENCODINGS`, or ``TF``.
        relay_cpu: CPU seconds of the relay per second of the run; None if the kernel shapes.
    """

    run: int
    case: str
    who: str
    figure: Figure
    relay_cpu: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints the table; 0 also where there can be no hosts."""
    cases = {case.name: case for case in CASES}

    def one(run: int, name: str, link: Link, peers: Path) -> Iterator[HostSample]:
        return measure(run, cases[name], link, peers)

    return on_hosts("hosts", __doc__ or "", list(cases), one, table, argv)


def on_hosts(
    section: str,
    description: str,
    names: Sequence[str],
    measure: Callable[[int, str, Link, Path], Iterator[SampleT]],
    table: Callable[[Sequence[SampleT]], str],
    argv: Sequence[str] | None,
) -> int:
    """Runs a benchmark of two hosts by its command line, and publishes its table as ``section`` of
    the README; returns 0, also where there can be no hosts.

    Args:
        measure: yields the samples of a run, a case and a link; the last argument is the folder of
            the peers' scripts.
    """
    module = section.replace("-", "_")
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--only", action="append", choices=names, metavar="CASE")
    parser.add_argument(
        "--peers", type=Path, default=ROOT.parent / "shared" / "peers", metavar="DIR"
    )
    add_arguments(parser)
    options = parser.parse_args(argv)
    why = why_no_hosts()
    if why:
        say(f"skipped: {why}")
        return 0
    # So that the hosts are removed; those of a killed process, the next one removes.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with Link() as link:
        samples = (
            sample
            for run in range(1, options.runs + 1)
            for name in names
            if not options.only or name in options.only
            for sample in measure(run, name, link, options.peers.resolve())
        )
        publish(section, samples, table, options)
    return 0


def measure(run: int, case: HostCase, link: Link, peers: Path) -> Iterator[HostSample]:
    """Runs every system once."""
    systems = [*ENCODINGS, "TF"]
    for who in systems if run % 2 else reversed(systems):
        began, cpu_s = time.monotonic(), link.relay_cpu_s()
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
            try:
                with Processes(link, Path(folder)) as processes:
                    if who == "TF":
                        figure = run_peer_parts(case.parts, case.peer, processes, peers)
                    else:
                        figure = run_ours(case, ENCODINGS[who], processes, Path(folder))
            except (RunFailed, TooShort) as error:
                figure = Figure(miss=str(error))
        share = None
        if cpu_s is not None:
            share = ((link.relay_cpu_s() or 0.0) - cpu_s) / (time.monotonic() - began)
        yield HostSample(run, case.name, who, figure, share)


def run_ours(case: HostCase, encoding: Sequence[str], processes: Processes, folder: Path) -> Figure:
    """Runs a job to its end.

    Raises:
        RunFailed: a process failed.
        TooShort: it has too few steps.
    """
    job = JOBS / f"{case.workload}.py"
    if case.workload in DENSE:
        dense = DENSE[case.workload]
        job = write_job(folder / "job.py", Dense(dense.count, dense.shape, case.steps))
    address = f"{HOSTS['near']}:{PORT}"
    there = ("--coordinator", address, "--insecure", "--die-with-parent")
    settings = [word for s in (*case.settings, *encoding) for word in ("--set", s)]
    serve = ("serve", "--job", str(job), "--run-dir", str(folder / "run"), "--shards", "1")
    bind = ("--bind", address, "--insecure", "--die-with-parent")
    processes.start("near", module_command("coordinator.cli", *serve, *bind, *settings))
    processes.start("near", module_command("pserver.cli", "serve", "--shard", "0", *there))
    workers = []
    for host in case.workers:
        # Namespaces share memory, which hosts do not.
        options = ("--no-shm",) if host == "far" else ()
        times = ("--step-times", str(folder / "steps" / f"{host}.csv"), "--gpu", "none")
        command = module_command("worker.cli", "run", *there, *options, *times)
        workers.append(processes.start(host, command))
    processes.wait(workers)
    return rate_of(step_ms(read_steps(folder / "steps"), WARMUP), len(workers))


def run_peer_parts(
    parts: Sequence[tuple[str, str]], case: str, processes: Processes, peers: Path
) -> Figure:
    """Runs the ``parts`` of a peer's script, each on its host; the last one prints the figure of
    ``case``.

    Raises:
        RunFailed: a part failed.
    """
    if not peers.is_dir():
        raise RunFailed(f"no {peers}")
    for host, part in parts:
        command = module_command("benchmarks.split_peer", str(peers), part, case)
        last = processes.start(host, command)
    processes.wait([last])
    return read_figure(processes.text(last), processes.said(last), case)


def rate_of(ms: float, workers: int) -> Figure:
    """Returns the figure of workers that take ``ms`` for a step each."""
    return Figure(ms / workers, 1e3 * workers / ms)


def table(samples: Sequence[HostSample]) -> str:
    """Returns markdown: rates of all systems, ratios to TensorFlow, what the relay took, and what
    is missing and why."""
    cases = list(dict.fromkeys(s.case for s in samples))
    rows, ratios, shares = [], [], []
    for case in cases:
        rates = {who: _median(samples, case, who) for who in (*ENCODINGS, "TF")}
        theirs = rates["TF"]
        rows.append([case, *map(number, rates.values())])
        ours = [rates[who] for who in ENCODINGS]
        ratios.append([case, *(_ratio(rate, theirs) for rate in ours)])
        used = [s.relay_cpu for s in samples if s.case == case and s.relay_cpu is not None]
        if used:
            shares.append(f"{case} {min(used):.2f} to {max(used):.2f}")
    misses = {f"- {s.case}, {s.who}: {s.figure.miss}" for s in samples if s.figure.miss}
    parts = [
        "Steps per second of all workers, medians.",
        markdown(["workload", *ENCODINGS, "TF"], rows),
        markdown(["ratio to TF", *ENCODINGS], ratios),
    ]
    if shares:
        parts.append(f"CPU seconds of the relay a second: {'; '.join(shares)}.")
    parts.append("\n".join(["Missing:\n", *sorted(misses), f"- {PYTORCH}"]))
    return "\n\n".join(parts) + "\n"


def _median(samples: Sequence[HostSample], case: str, who: str) -> float | None:
    found = [
        s.figure.steps_per_s or 1e3 / s.figure.ms
        for s in samples
        if (s.case, s.who) == (case, who) and s.figure.ms
    ]
    return statistics.median(found) if found else None


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}×" if ours and theirs else number(None)


if __name__ == "__main__":
    sys.exit(main())
