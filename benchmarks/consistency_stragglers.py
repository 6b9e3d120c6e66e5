"""Experiment 1: one of four workers is five times slower.

Mostly on workers that sleep instead of computing, so that the cores of this machine are no limit;
and once on real MNIST, where they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.cluster import ROOT, Cluster, RunFailed
from benchmarks.experiment import Experiment, Figures, Found, have, misses
from benchmarks.sleeping_cluster import SleepingCluster
from benchmarks.table import MISSING, markdown, number
from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from psrpc.v1 import coordinator_pb2 as pb

WORKERS, SLOW_DOWN, K, M = 4, 5.0, 12, 9
EXAMPLE_S = 0.005
"""So that a micro-batch of 10 takes 50 ms: fifty times what its RPCs take."""

WARMUP_S, SECONDS = 3.0, 15.0
BARRIER = "barrier"
TARGET = 0.7

POLICIES: Mapping[str, tuple[str, ...]] = {
    BARRIER: ("mode=sync", f"replicas={K}"),
    "barrier + speculation": ("mode=sync", f"replicas={K}", "speculate=true"),
    "barrier + balance": ("mode=sync", f"replicas={K}", "balance=true"),
    f"backup workers, M={M}": ("mode=sync", f"replicas={K}", f"aggregate={M}"),
    "ssp s=4": ("mode=ssp", "staleness=4"),
    "async": ("mode=async",),
}
"""All with K = 12 micro-batches, where there are rounds."""

MNIST = ROOT / "examples" / "mnist_dnn.py"
REAL = "mnist"
REAL_POLICIES = (BARRIER, "barrier + speculation", f"backup workers, M={M}", "async")


def names(small: bool) -> list[str]:
    """``where/policy/how``, how being ``even`` or ``slowed``."""
    found = [f"sleep/{policy}/{how}" for policy in POLICIES for how in ("even", "slowed")]
    real = [f"{REAL}/{policy}/{how}" for policy in REAL_POLICIES for how in ("even", "slowed")]
    return [*found[:4], real[1]] if small else [*found, *real]


def measure(name: str, small: bool) -> Figures:
    """Examples per second."""
    where, policy, how = name.split("/")
    warmup_s, seconds = (1.0, 3.0) if small else (WARMUP_S, SECONDS)
    slow_down = SLOW_DOWN if how == "slowed" else 1.0
    if where == REAL:
        return _measure_real(POLICIES[policy], slow_down, warmup_s, seconds)
    slow_downs = [slow_down, *[1.0] * (WORKERS - 1)]
    with SleepingCluster(POLICIES[policy], EXAMPLE_S, slow_downs) as cluster:
        rate = cluster.measure(warmup_s, seconds)
    return {"examples_per_s": round(rate.examples_per_s, 1), **seen(rate.status)}


def _measure_real(
    settings: tuple[str, ...], slow_down: float, warmup_s: float, seconds: float
) -> Figures:
    """The same of ``coordinator up --slow-down``, which slows one of the workers."""
    # The rate has no influence on speed, and plain async does not survive the example's own.
    settings = (*settings, "epochs=1000", "optimizer.learning_rate=0.001", "eval=none")
    slow = ("--slow-down", f"{slow_down:g}") if slow_down > 1 else ()
    with (
        Cluster(MNIST, workers=WORKERS, settings=settings, options=slow) as cluster,
        CoordinatorClient(cluster.address(), cluster.security()) as client,
    ):
        _await_workers(cluster, client)
        time.sleep(warmup_s)
        began, first = time.monotonic(), client.get_job_status()
        time.sleep(seconds)
        ended, last = time.monotonic(), client.get_job_status()
    rate = (last.examples - first.examples) / (ended - began)
    return {"examples_per_s": round(rate, 1), **seen(last)}


def _await_workers(cluster: Cluster, client: CoordinatorClient) -> None:
    deadline = time.monotonic() + 120.0
    while cluster.running and time.monotonic() < deadline:
        with suppress(PsError):
            status = client.get_job_status()
            if sum(worker.batches > 0 for worker in status.workers) == WORKERS:
                return
        time.sleep(0.1)
    raise RunFailed("not all workers had begun after two minutes")


def seen(status: pb.GetJobStatusResponse) -> dict[str, Any]:
    """The last status of the run."""
    return {
        "mean_staleness": round(status.mean_staleness, 3),
        "speculative": status.speculative,
        "superseded": status.superseded,
        "late": status.late,
        "stragglers": list(status.stragglers),
    }


def ratio(found: Found, where: str, policy: str) -> float | None:
    """Of the slowed rate to that of the barrier whose workers are all alike: what a user of the
    barrier gets back."""
    there = have(found)
    even, slowed = there.get(f"{where}/{BARRIER}/even"), there.get(f"{where}/{policy}/slowed")
    if even is None or slowed is None:
        return None
    return float(slowed["examples_per_s"] / even["examples_per_s"])


def _rate(found: Found, name: str) -> float | None:
    figures = have(found).get(name)
    return None if figures is None else float(figures["examples_per_s"])


def table(found: Found) -> str:
    """Both places, one below the other."""
    parts = []
    for where, title, policies in (
        ("sleep", "Workers that sleep 50 ms for a micro-batch:", tuple(POLICIES)),
        (REAL, "Real `mnist_dnn` on two cores:", REAL_POLICIES),
    ):
        rows = []
        for policy in policies:
            back = ratio(found, where, policy)
            stated = policy.startswith(("barrier + spec", "backup"))
            rows.append(
                [
                    policy,
                    number(_rate(found, f"{where}/{policy}/even")),
                    number(_rate(found, f"{where}/{policy}/slowed")),
                    MISSING if back is None else f"{back:.0%}{_verdict(back) if stated else ''}",
                ]
            )
        header = ["policy", "examples/s", "one worker 5× slower", "of the even barrier"]
        parts.append(f"{title}\n\n{markdown(header, rows)}")
    return "\n\n".join(parts) + _named(found) + misses(found)


def _verdict(back: float) -> str:
    return f" (≥ {TARGET:.0%}, {'met' if back >= TARGET else '**missed**'})"


def _named(found: Found) -> str:
    for name, figures in have(found).items():
        if name.endswith("slowed") and figures["stragglers"]:
            return f"\n\nStatus said ({name}): {'; '.join(figures['stragglers'])}"
    return ""


def plot(found: Found, path: Path) -> None:
    """Bars of the sleeping workers."""
    nan = float("nan")

    def rates(how: str) -> list[float]:
        values = [_rate(found, f"sleep/{policy}/{how}") for policy in POLICIES]
        return [nan if value is None else value for value in values]

    even = _rate(found, f"sleep/{BARRIER}/even")
    plots.bars(
        path,
        list(POLICIES),
        {"four alike": rates("even"), "one 5× slower": rates("slowed")},
        ylabel="examples/s",
        title="Four workers, one of them slowed",
        line=None if even is None else (TARGET * even, "70 % of the even barrier"),
    )


EXPERIMENT = Experiment(1, "One slow worker of four", 8, names, measure, table, plot)
