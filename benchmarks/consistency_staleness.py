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
from psrpc.core.policy import Policy

if TYPE_CHECKING:
    from benchmarks.simulated_training import Model

JOB = ROOT / "benchmarks" / "jobs" / "mnist_cnn_stale.py"

RATES: Mapping[float, Sequence[int]] = {0.03: (0, 1, 2), 0.1: (0,)}
"""Learning rates of plain SGD, as in the papers, whose mathematics is that of SGD; and the seeds
that are run with each. 0.1 is the better one for a single worker."""

STALENESS, EPOCHS = (8, 16), 2

POLICIES: Mapping[str, Policy] = {
    "async": Policy(),
    "inverse learning rate": Policy(staleness_lr="inverse"),
    "DC-ASGD-c": Policy(delay_compensation="constant"),
    "DC-ASGD-a": Policy(delay_compensation="adaptive"),
}
"""The rows but the first and the last, which have no staleness."""

ALONE, SYNC = "one worker", "sync"


def names(small: bool) -> list[str]:
    """``policy/staleness/learning rate/seed``."""
    found = []
    for rate, seeds in RATES.items():
        for seed in seeds[:1] if small else seeds:
            found.append(f"{ALONE}/0/{rate:g}/{seed}")
            for staleness in STALENESS:
                found += [f"{p}/{staleness}/{rate:g}/{seed}" for p in (*POLICIES, SYNC)]
    return found


def measure(name: str, small: bool) -> Figures:
    """See :mod:`benchmarks.simulated_training`."""
    from benchmarks.simulated_training import train

    policy, staleness, rate, seed = name.split("/")
    workers = int(staleness) + 1
    settings = POLICIES.get(policy, Policy())
    if policy == SYNC:
        # As many gradients as there would be workers.
        settings = Policy(mode="sync", replicas=workers)
    model = _model(rate, int(seed), small)
    return asdict(train(model, settings, workers, 1 if small else EPOCHS))


@lru_cache(maxsize=1)
def _model(rate: str, seed: int, small: bool) -> Model:
    """Made once for the runs of a rate and a seed."""
    from benchmarks.simulated_training import Model
    from worker.runtime.quiet import import_tensorflow

    import_tensorflow()
    batch_size = ["batch_size=2000"] if small else []
    settings = [f"seed={seed}", f"optimizer.learning_rate={rate}", *batch_size]
    return Model(JOB, settings).__enter__()


def accuracies(found: Found, policy: str, staleness: int, rate: float) -> list[float]:
    """At the end, one for each seed that was run."""
    wanted = f"{policy}/{staleness}/{rate:g}/"
    return [f["accuracy"][-1] for name, f in have(found).items() if name.startswith(wanted)]


def shown(values: Sequence[float]) -> str:
    """Mean and half of the range; the one there is."""
    if not values:
        return MISSING
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):.4f} ± {(max(values) - min(values)) / 2:.4f}"


def table(found: Found) -> str:
    """Rows are policies, columns learning rates and staleness."""
    columns = [(rate, staleness) for rate in RATES for staleness in STALENESS]
    rows = []
    for policy in (ALONE, *POLICIES, SYNC):
        cells = [
            shown(accuracies(found, policy, 0 if policy == ALONE else staleness, rate))
            for rate, staleness in columns
        ]
        rows.append([policy, *cells])
    header = ["policy", *(f"η = {rate:g}, τ = {staleness}" for rate, staleness in columns)]
    return markdown(header, rows) + misses(found)


def plot(found: Found, path: Path) -> None:
    """Bars of the mean, with the range of the seeds."""
    policies = [ALONE, *POLICIES, SYNC]
    means: dict[str, list[float]] = {}
    spreads: dict[str, list[float]] = {}
    for rate in RATES:
        for staleness in STALENESS:
            series = [accuracies(found, p, 0 if p == ALONE else staleness, rate) for p in policies]
            label = f"learning rate {rate:g}, staleness {staleness}"
            means[label] = [statistics.mean(s) if s else float("nan") for s in series]
            spreads[label] = [(max(s) - min(s)) / 2 if s else 0.0 for s in series]
    plots.bars(
        path,
        policies,
        means,
        spread=spreads,
        ylabel="test accuracy",
        title=f"mnist_cnn, SGD, {EPOCHS} epochs, injected staleness",
    )


EXPERIMENT = Experiment(3, "Injected staleness", 10, names, measure, table, plot)
