"""How long a job takes from the command to its first step, and from a kill to its next one.

    python -m benchmarks.start [--runs 3] [--after 8] [--json FILE] [--readme]

Each run starts ``coordinator up`` with one shard and one worker, with the warm start and without,
for both update engines. It kills one process once, since a killed worker leaves no step times.
Times come from the step times of workers, on the clock that all processes of the host share.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.report import add_arguments, publish
from benchmarks.steps import read_steps
from benchmarks.table import markdown
from benchmarks.workloads import Dense
from coordinator.client.client import CoordinatorClient
from pserver.updates.engine import EngineKind
from psrpc.core.errors import PsError

JOB = Dense(1, (16384, 1024), steps=10**6)
"""64 MB of parameters, and more steps than a run makes."""

Event = Literal["import", "start", "worker", "shard"]
"""The timed parts: the import of TensorFlow and Keras in one process; the command until the end of
the first step; the kill of a process until the end of the next step."""

WARM: dict[bool, tuple[str, ...]] = {True: (), False: ("--no-warm-start",)}

OVER_IMPORT_S = 3.0
"""How much longer than the import the start may take."""

TARGETS: dict[Event, float] = {"worker": 2.5, "shard": 3.0}

TRAINED = 50
"""Steps before a kill."""

FIRST_STEP_S = 120.0
TICK_S = 0.1


@dataclass(frozen=True)
class StartSample:
    """One time of one run, in seconds; or why there is none."""

    run: int
    event: Event
    engine: str
    warm: bool
    seconds: float | None = None
    miss: str = ""


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--after", type=float, default=8.0, metavar="SECONDS", help="of each run after its kill"
    )
    parser.add_argument("--engine", action="append", choices=get_args(EngineKind))
    parser.add_argument("--warm-only", action="store_true", help="leave out --no-warm-start")
    add_arguments(parser)
    options = parser.parse_args(argv)
    engines = options.engine or get_args(EngineKind)
    samples = (
        sample
        for run in range(1, options.runs + 1)
        for sample in measure_all(run, engines, not options.warm_only, options.after)
    )
    publish("start", samples, table, options)


def measure_all(
    run: int, engines: Sequence[str], cold: bool, after_s: float
) -> Iterator[StartSample]:
    """Measures everything once; with and without the warm start in turns."""
    for engine in engines:
        # In the same minute as the starts beside which it stands.
        yield StartSample(run, "import", engine, False, import_s())
        for killed in ("shard", "worker"):
            for warm in (True, False) if cold else (True,):
                try:
                    yield from measure(run, killed, engine, warm, after_s)
                except (RunFailed, PsError) as error:
                    yield StartSample(run, killed, engine, warm, miss=str(error))


def import_s() -> float:
    """Seconds of a process that imports TensorFlow and Keras."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", "import tensorflow, keras"], check=True, stderr=subprocess.DEVNULL
    )
    return time.monotonic() - began


def measure(
    run: int, killed: Literal["shard", "worker"], engine: str, warm: bool, after_s: float
) -> Iterator[StartSample]:
    """Runs one job and kills one process of it; a run whose worker lives has its start as well.

    Raises:
        RunFailed: it did not begin to train, or ended by itself.
    """
    began = time.monotonic()
    settings = (f"engine={engine}",)
    with Cluster(JOB, settings=settings, options=("--insecure", *WARM[warm])) as cluster:
        wait_for_steps(cluster)
        [process] = cluster.processes("pserver" if killed == "shard" else "worker")
        at = time.monotonic()
        os.kill(process, signal.SIGKILL)
        time.sleep(after_s)
        cluster.stop()
        steps = read_steps(cluster.run_dir / "steps")
    ends = [end for worker in steps for end in worker.ends.tolist()]
    if killed == "shard" and ends:
        yield StartSample(run, "start", engine, warm, ends[0] - began)
    seconds = pause_s(ends, at)
    miss = "" if seconds is not None else f"no step within {after_s:.0f} s"
    yield StartSample(run, killed, engine, warm, seconds, miss)


def wait_for_steps(cluster: Cluster) -> None:
    """Blocks until the job has made :data:`TRAINED` steps."""
    deadline = time.monotonic() + FIRST_STEP_S
    with CoordinatorClient(cluster.address(), cluster.security()) as client:
        while client.get_job_status().global_step < TRAINED:
            if not cluster.running:
                cluster.wait()
                raise RunFailed("the job ended before the kill")
            if time.monotonic() > deadline:
                raise RunFailed(f"no {TRAINED} steps after {FIRST_STEP_S:.0f} s")
            time.sleep(TICK_S)


def pause_s(ends: Sequence[float], killed: float) -> float | None:
    """Returns the seconds from ``killed`` to the end of the step that ends the longest wait after
    it, since a step under way may still end; None if there is no later step.

    ``ends`` are those of all steps, in order."""
    later = [end for end in ends if end > killed]
    waits = [end - before for before, end in zip([killed, *later], later, strict=False)]
    return later[waits.index(max(waits))] - killed if waits else None


def table(samples: Sequence[StartSample]) -> str:
    """Returns markdown: medians with all values, beside their targets; what is missing and why."""
    rows = []
    names = {
        "import": "`import tensorflow, keras`, turn of",
        "start": "`coordinator up` to first step",
        "worker": "worker killed to next step",
        "shard": "shard killed to next step",
    }
    for event, name in names.items():
        for engine in dict.fromkeys(s.engine for s in samples):
            imports = _found(samples, "import", engine, False)
            target = TARGETS.get(event)  # type: ignore[call-overload]
            if event == "start" and imports:
                target = statistics.median(imports) + OVER_IMPORT_S
            cells = [
                _times(_found(samples, event, engine, warm), target if warm else None)
                for warm in WARM
            ]
            joint = " " if event == "import" else ", "
            rows.append([f"{name}{joint}{engine}", *cells])
    misses = [
        f"- run {s.run}, {s.event}, {s.engine}, {'warm' if s.warm else 'cold'}: {s.miss}"
        for s in samples
        if s.miss
    ]
    text = markdown(["seconds", "warm start", "`--no-warm-start`"], rows) + "\n"
    return text + ("\nMissing:\n\n" + "\n".join(misses) + "\n" if misses else "")


def _found(samples: Sequence[StartSample], event: str, engine: str, warm: bool) -> list[float]:
    return [
        s.seconds
        for s in samples
        if (s.event, s.engine, s.warm) == (event, engine, warm) and s.seconds is not None
    ]


def _times(seconds: Sequence[float], target: float | None) -> str:
    if not seconds:
        return "–"
    middle = statistics.median(seconds)
    every = " ".join(f"{value:.1f}" for value in sorted(seconds))
    text = f"{middle:.1f} ({every})"
    if target is not None:
        text += f" ≤ {target:.1f}, {'met' if middle <= target else '**missed**'}"
    return text


if __name__ == "__main__":
    main()
