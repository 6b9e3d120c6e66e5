"""Experiment 3: what gradients that are 8 and 16 updates old do to accuracy, and what helps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import plots
from benchmarks.cluster import ROOT
from benchmarks.experiment import Experiment, Figures, Found, have, misses
from benchmarks.table import MISSING, markdown
from psrpc.policy import Policy

if TYPE_CHECKING:
    from benchmarks.simulated_training import Model

JOB = ROOT / "examples" / "mnist_cnn.py"

LEARNING_RATE = 0.3
"""Of plain SGD, as in the papers, whose mathematics is that of SGD. Large, since staleness does
nothing where steps are small."""

STALENESS, SEEDS, EPOCHS = (8, 16), (0, 1, 2), 2

POLICIES: Mapping[str, Policy] = {
    "async": Policy(),
    "inverse learning rate": Policy(staleness_lr="inverse"),
    "DC-ASGD-c": Policy(delay_compensation="constant"),
    "DC-ASGD-a": Policy(delay_compensation="adaptive"),
}
"""The rows but the first and the last, which have no staleness."""

ALONE, SYNC = "one worker", "sync"


def names(small: bool) -> list[str]:
    """``policy/staleness/seed``."""
    found = []
    for seed in SEEDS[:1] if small else SEEDS:
        found.append(f"{ALONE}/0/{seed}")
        for staleness in STALENESS:
            found += [f"{policy}/{staleness}/{seed}" for policy in (*POLICIES, SYNC)]
    return found


def measure(name: str, small: bool) -> Figures:
    """See :mod:`benchmarks.simulated_training`."""
    from benchmarks.simulated_training import train

    policy, staleness, seed = name.split("/")
    workers = int(staleness) + 1
    settings = POLICIES.get(policy, Policy())
    if policy == SYNC:
        # As many gradients as there would be workers.
        settings = Policy(mode="sync", replicas=workers)
    found = train(_model(int(seed), small), settings, workers, 1 if small else EPOCHS)
    return asdict(found)


@lru_cache(maxsize=1)
def _model(seed: int, small: bool) -> Model:
    """Made once for the runs of a seed."""
    from benchmarks.simulated_training import Model
    from worker.quiet import import_tensorflow

    import_tensorflow()
    batch_size = ["batch_size=2000"] if small else []
    rate = f"optimizer.learning_rate={LEARNING_RATE}"
    return Model(JOB, [f"seed={seed}", "optimizer=sgd", rate, *batch_size]).__enter__()


def accuracies(found: Found, policy: str, staleness: int) -> list[float]:
    """At the end, one for each seed that was run."""
    wanted = f"{policy}/{staleness}/"
    return [f["accuracy"][-1] for name, f in have(found).items() if name.startswith(wanted)]


def shown(values: Sequence[float]) -> str:
    """Mean and half of the range."""
    if not values:
        return MISSING
    return f"{statistics.mean(values):.4f} ± {(max(values) - min(values)) / 2:.4f}"


def table(found: Found) -> str:
    """Rows are policies, columns staleness."""
    rows = [[ALONE, *[shown(accuracies(found, ALONE, 0))] * len(STALENESS)]]
    for policy in (*POLICIES, SYNC):
        rows.append([policy, *(shown(accuracies(found, policy, s)) for s in STALENESS)])
    header = ["policy", *(f"staleness {s}, or K = {s + 1}" for s in STALENESS)]
    return markdown(header, rows) + misses(found)


def plot(found: Found, path: Path) -> None:
    """Bars of the mean, with the range of the seeds."""
    policies = [ALONE, *POLICIES, SYNC]
    means: dict[str, list[float]] = {}
    spreads: dict[str, list[float]] = {}
    for staleness in STALENESS:
        series = [accuracies(found, p, 0 if p == ALONE else staleness) for p in policies]
        label = f"staleness {staleness}"
        means[label] = [statistics.mean(s) if s else float("nan") for s in series]
        spreads[label] = [(max(s) - min(s)) / 2 if s else 0.0 for s in series]
    plots.bars(
        path,
        policies,
        means,
        spread=spreads,
        ylabel="test accuracy",
        title=f"mnist_cnn, SGD {LEARNING_RATE:g}, {EPOCHS} epochs, injected staleness",
    )


EXPERIMENT = Experiment(3, "Injected staleness", 10, names, measure, table, plot)
