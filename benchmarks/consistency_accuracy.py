"""Experiment 2: ``mnist_cnn`` under every policy, until 97 % of the test data are right."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import plots
from benchmarks.cluster import ROOT, Cluster, RunFailed
from benchmarks.experiment import Experiment, Figures, Found, have, misses
from benchmarks.milestones import checkpoints_of, evaluator, first_reached
from benchmarks.table import MISSING, markdown, number
from psrpc.files.run_paths import read_summary

JOB = ROOT / "examples" / "mnist_cnn.py"

SHARDS, WORKERS, K, H = 2, 3, 3, 4
SEEDS, EPOCHS, TARGET = (0, 1, 2), 3, 0.97
BETWEEN = 30
"""Micro-batches from one checkpoint to the next: how exactly the milestone is known."""

LIMIT_S = 300.0

SGD = ("optimizer=sgd", "optimizer.learning_rate=0.1")
"""For local steps, which take no other optimizer; and for what they are compared with."""


@dataclass(frozen=True)
class Row:
    """One policy: its settings, and the micro-batches that make one of its steps."""

    settings: Sequence[str]
    micro_batches: int = 1


ASYNC, SYNC = ("mode=async",), ("mode=sync", f"replicas={K}")
LOCAL = f"local_steps={H}"

POLICIES: Mapping[str, Row] = {
    "async": Row(ASYNC),
    "async, max_staleness=2": Row((*ASYNC, "max_staleness=2")),
    "async, inverse": Row((*ASYNC, "staleness_lr=inverse")),
    "async, DC-ASGD-c": Row((*ASYNC, "delay_compensation=constant")),
    "async, DC-ASGD-a": Row((*ASYNC, "delay_compensation=adaptive")),
    "ssp s=1": Row(("mode=ssp", "staleness=1")),
    "sync": Row(SYNC, K),
    "sync, speculate": Row((*SYNC, "speculate=true"), K),
    "sync, balance": Row((*SYNC, "balance=true"), K),
    "sync, M=2 of 3": Row((*SYNC, "aggregate=2"), 2),
    "sync, then async": Row((*SYNC, "then=async", "then_after=1")),
    "async, SGD": Row((*ASYNC, *SGD)),
    f"async, SGD, H={H}": Row((*ASYNC, *SGD, LOCAL), H),
    f"sync, SGD, H={H}": Row((*SYNC, *SGD, LOCAL), K * H),
}


def names(small: bool) -> list[str]:
    """``policy/seed``."""
    if small:
        return [f"{policy}/0" for policy in list(POLICIES)[:1]]
    return [f"{policy}/{seed}" for seed in SEEDS for policy in POLICIES]


def measure(name: str, small: bool) -> Figures:
    """Trains on a real cluster, with many checkpoints, and evaluates those until one will do."""
    policy, seed = name.split("/")
    row = POLICIES[policy]
    settings = [
        *row.settings,
        f"seed={seed}",
        f"epochs={1 if small else EPOCHS}",
        f"checkpoint_every={max(1, BETWEEN // row.micro_batches)}",
        "keep_checkpoints=100000",
    ]
    if small and "then_after=1" in settings:
        raise RunFailed("a rule needs more than one epoch")
    with Cluster(JOB, shards=SHARDS, workers=WORKERS, settings=settings) as cluster:
        workers = cluster.wait(LIMIT_S)
        began = min(float(worker.starts[0]) for worker in workers if len(worker.starts))
        summary = read_summary(cluster.run_dir)
        reached = first_reached(checkpoints_of(cluster.run_dir), began, TARGET, evaluator(JOB))
    return {
        "reached": None if reached is None else asdict(reached),
        "accuracy": summary["eval"]["accuracy"],
        "steps": summary["global_step"],
        "train_s": summary["train_s"],
        "examples_per_s": summary["examples_per_s"],
        "staleness": staleness_counts(summary),
        "mean_staleness": summary["mean_staleness"],
        "measured": time.strftime("%Y-%m-%d"),
    }


def staleness_counts(summary: Mapping[str, object]) -> list[int]:
    """How many pushes had staleness 0, 1, …, over all shards; empty for an older summary."""
    counts = summary.get("staleness_counts") or []
    assert isinstance(counts, list)
    return [int(count) for count in counts]


def table(found: Found) -> str:
    """A row for each policy: mean and half of the range over the seeds."""
    rows = []
    for policy, row in POLICIES.items():
        runs = _runs(found, policy)
        if not runs:
            continue
        reached = [run["reached"] for run in runs if run["reached"]]
        never = len(runs) - len(reached)
        rows.append(
            [
                policy,
                _shown([r["seconds"] for r in reached]),
                _shown([r["step"] for r in reached]),
                _shown([r["step"] * row.micro_batches for r in reached])
                if "then" not in policy
                else MISSING,
                f"{never} of {len(runs)}" if never else "",
                _shown([run["accuracy"] for run in runs], "{:.4f}"),
                _shown([run["examples_per_s"] for run in runs]),
                _shown([run["mean_staleness"] for run in runs], "{:.2f}"),
            ]
        )
    header = [
        "policy",
        f"s to {TARGET:.0%}",
        "steps",
        "micro-batches",
        "never",
        f"accuracy after {EPOCHS} epochs",
        "examples/s",
        "mean staleness",
    ]
    return markdown(header, rows) + misses(found)


def _runs(found: Found, policy: str) -> list[Figures]:
    return [f for name, f in have(found).items() if name.rpartition("/")[0] == policy]


def _shown(values: Sequence[float], form: str = "") -> str:
    if not values:
        return MISSING
    mean, half = statistics.mean(values), (max(values) - min(values)) / 2
    if form:
        return f"{form.format(mean)} ± {form.format(half)}"
    return f"{number(mean)} ± {number(half)}"


def plot(found: Found, path: Path) -> None:
    """Time to the target; beside it, in a file of its own, the staleness that there was."""
    policies = [policy for policy in POLICIES if _runs(found, policy)]
    means, spreads = [], []
    for policy in policies:
        values = [run["reached"]["seconds"] for run in _runs(found, policy) if run["reached"]]
        means.append(statistics.mean(values) if values else float("nan"))
        spreads.append((max(values) - min(values)) / 2 if values else 0.0)
    plots.bars(
        path,
        policies,
        {"mean of the seeds": means},
        spread={"mean of the seeds": spreads},
        ylabel=f"seconds to {TARGET:.0%}",
        title=f"mnist_cnn, {WORKERS} workers on two cores",
    )
    counts = {policy: histogram(_runs(found, policy)) for policy in policies}
    plots.histograms(
        path.with_stem(f"{path.stem}-staleness"),
        {policy: values for policy, values in counts.items() if values},
        title="staleness of the gradients, as a share of all",
    )


def histogram(runs: Sequence[Figures]) -> list[float]:
    """The sum over runs, up to the last count that is not 0."""
    most = max((len(run["staleness"]) for run in runs), default=0)
    total = np.zeros(most)
    for run in runs:
        total[: len(run["staleness"])] += run["staleness"]
    used = np.flatnonzero(total)
    return [float(v) for v in total[: used[-1] + 1]] if len(used) else []


EXPERIMENT = Experiment(2, "mnist_cnn to 97 %", 25, names, measure, table, plot)
