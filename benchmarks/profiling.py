"""Where the time goes while a workload runs:

    python -m benchmarks.profiling CASE [--transport tcp] [--seconds 10] [--top 15] [--native]

Starts the job as the benchmark does and, once it trains, samples its shard and its first worker.
Prints for each how many cores it kept busy, and where: with py-spy (of the `bench` extra) the
Python functions of the threads that ran, time in a C library counting for its caller; with
`--native`, by Linux's perf, the functions of the libraries and of the kernel themselves. Both need
the right to trace processes (root, or the kernel settings yama.ptrace_scope=0 and
perf_event_paranoid=1).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from benchmarks.cluster import Cluster
from benchmarks.table import markdown
from benchmarks.workloads import CASES, Transport
from coordinator.client.client import CoordinatorClient

SETTLED = 50
"""Steps after which a job is looked at."""

ENDLESS = "epochs=10000"
HERTZ = "499"

Shares = dict[str, float]
"""A function, and how many samples, or what part of them, ended in it."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    case = next(case for case in CASES if case.name == options.case)
    record, read = (_perf, _read_perf) if options.native else (_py_spy, _read_py_spy)
    with Cluster(
        case.job, workers=case.workers, transport=options.transport, settings=[ENDLESS]
    ) as cluster:
        _wait_until_settled(cluster)
        pids = {
            name: cluster.processes(command)[0]
            for name, command in (("shard", "pserver"), ("worker", "worker"))
        }
        files = {name: cluster.run_dir / f"{name}.samples" for name in pids}
        used = {name: _cpu_s(pid) for name, pid in pids.items()}
        recorders = [
            subprocess.Popen(
                record(pid, files[name], options.seconds),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, pid in pids.items()
        ]
        time.sleep(options.seconds)
        cores = {name: (_cpu_s(pid) - used[name]) / options.seconds for name, pid in pids.items()}
        for recorder in recorders:
            _, said = recorder.communicate(timeout=60)
            if recorder.returncode:
                raise SystemExit(f"{record.__name__.strip('_')}: {said.strip()}")
        for name, file in files.items():
            sys.stdout.write(
                f"{case.name}, {options.transport}: the {name} kept {cores[name]:.2f} cores busy"
                f"\n\n{table(read(file), options.top)}\n\n"
            )


def table(shares: Shares, top: int) -> str:
    """Markdown: the functions that most time was spent in, not counting what they call."""
    total = sum(shares.values())
    found = sorted(shares.items(), key=lambda item: -item[1])[:top]
    rows = [[f"`{name}`", f"{100 * share / total:.1f}"] for name, share in found]
    return markdown(["function", "% of the time"], rows)


def from_stacks(lines: Iterable[str]) -> Shares:
    """Of collapsed stacks, ``outer (a.py:1);inner (b.py:2) 12``; the line does not matter."""
    shares: Shares = {}
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frame = stack.rpartition(";")[2]
        name = re.sub(r":\d+\)$", ")", frame)
        if name:
            shares[name] = shares.get(name, 0.0) + int(count)
    return shares


def from_report(lines: Iterable[str]) -> Shares:
    """Of lines ``12.34% |library |[.] function``, as perf prints them below its comments."""
    shares: Shares = {}
    for line in lines:
        if line.strip() and not line.startswith("#"):
            overhead, library, symbol = map(str.strip, line.split("|", 2))
            name = f"{symbol[4:]} ({library})"
            shares[name] = shares.get(name, 0.0) + float(overhead.rstrip("%"))
    return shares


def _py_spy(pid: int, file: Path, seconds: int) -> list[str]:
    command = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(pid)]
    # A process that is stopped for each sample does not tell who waits and who works.
    command += ["--nonblocking", "--rate", HERTZ, "--duration", str(seconds)]
    return [*command, "--format", "raw", "--output", str(file)]


def _read_py_spy(file: Path) -> Shares:
    return from_stacks(file.read_text().splitlines())


def _perf(pid: int, file: Path, seconds: int) -> list[str]:
    command = ["perf", "record", "--quiet", "--event", "cpu-clock", "--freq", HERTZ]
    command += ["--pid", str(pid), "--output", str(file)]
    return [*command, "--", "sleep", str(seconds)]


def _read_perf(file: Path) -> Shares:
    command = ["perf", "report", "--stdio", "--input", str(file), "--field-separator", "|"]
    command += ["--fields", "overhead,dso,symbol"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return from_report(done.stdout.splitlines())


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_until_settled(cluster: Cluster) -> None:
    with CoordinatorClient(cluster.address(), cluster.security()) as coordinator:
        while coordinator.get_job_status().global_step < SETTLED:
            if not cluster.running:
                cluster.wait()
            time.sleep(0.1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", choices=[case.name for case in CASES])
    parser.add_argument("--transport", choices=get_args(Transport), default="shm")
    parser.add_argument("--seconds", type=int, default=10, metavar="S", help="default: 10")
    parser.add_argument("--top", type=int, default=15, metavar="N", help="default: 15")
    parser.add_argument("--native", action="store_true", help="C libraries and the kernel")
    return parser


if __name__ == "__main__":
    main()
