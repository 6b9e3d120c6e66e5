"""Experiment 5: batches of 64 to 4096 examples, with and without the large-batch recipe."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import plots
from benchmarks.cluster import ROOT
from benchmarks.consistency_staleness import shown
from benchmarks.experiment import Experiment, Figures, Found, have, misses
from benchmarks.table import markdown
from psrpc.core.batch import batches_per_epoch
from psrpc.core.policy import Policy

if TYPE_CHECKING:
    from benchmarks.simulated_training import Model

JOB = ROOT / "examples" / "mnist_dnn.py"

BATCH_SIZE, REPLICAS = 64, (1, 4, 16, 64)
"""Micro-batches of 64; K of them are a batch of 64 K."""

LEARNING_RATE, MOMENTUM = 0.01, 0.9
"""At a batch of 64, with the cosine schedule of the example."""

EPOCHS, WARMUP_EPOCHS, SEEDS = 10, 2, (0, 1, 2)

RECIPES: Mapping[str, str] = {
    "plain": "learning rate as it is",
    "linear": "scale_lr=linear",
    "warmup": f"scale_lr=linear, warmup_epochs={WARMUP_EPOCHS}",
}


def names(small: bool) -> list[str]:
    """``recipe/K/seed``; a batch of one micro-batch has nothing to scale."""
    return [
        f"{recipe}/{replicas}/{seed}"
        for seed in (SEEDS[:1] if small else SEEDS)
        for replicas in REPLICAS
        for recipe in RECIPES
        if replicas > 1 or recipe == "plain"
    ]


def measure(name: str, small: bool) -> Figures:
    """See :mod:`benchmarks.simulated_training`."""
    from benchmarks.simulated_shard import Recipe
    from benchmarks.simulated_training import train

    recipe, replicas, seed = name.split("/")
    k = int(replicas)
    epochs = 1 if small else EPOCHS
    model = _model(int(seed), k, epochs)
    records = model.job.train.num_records
    updates = -(-batches_per_epoch(records, BATCH_SIZE) // k)
    found = train(
        model,
        Policy(mode="sync", replicas=k),
        1,
        epochs,
        Recipe(
            rate_scale=1.0 if recipe == "plain" else float(k),
            warmup_updates=WARMUP_EPOCHS * updates if recipe == "warmup" else 0,
        ),
    )
    return asdict(found)


@lru_cache(maxsize=1)
def _model(seed: int, replicas: int, epochs: int) -> Model:
    """Made once for the recipes; the schedule depends on how many updates there are."""
    from benchmarks.simulated_training import Model
    from worker.runtime.quiet import import_tensorflow

    import_tensorflow()
    settings = [
        f"seed={seed}",
        f"batch_size={BATCH_SIZE}",
        f"epochs={epochs}",
        "mode=sync",
        f"replicas={replicas}",
        f"optimizer.learning_rate={LEARNING_RATE}",
        f"optimizer.momentum={MOMENTUM}",
    ]
    return Model(JOB, settings).__enter__()


def accuracies(found: Found, recipe: str, replicas: int) -> list[float]:
    """At the end, one for each seed that was run."""
    if replicas == 1:
        recipe = "plain"
    wanted = f"{recipe}/{replicas}/"
    return [f["accuracy"][-1] for name, f in have(found).items() if name.startswith(wanted)]


def table(found: Found) -> str:
    """Rows are batches, columns what is done to the learning rate."""
    rows = [
        [
            str(BATCH_SIZE * k),
            str(k),
            *(shown(accuracies(found, recipe, k)) for recipe in RECIPES),
        ]
        for k in REPLICAS
    ]
    return markdown(["batch", "K", *RECIPES.values()], rows) + misses(found)


def plot(found: Found, path: Path) -> None:
    """Curves of the mean over the batch."""
    curves = {}
    for recipe, label in RECIPES.items():
        points = [(BATCH_SIZE * k, accuracies(found, recipe, k)) for k in REPLICAS]
        there = [(x, statistics.mean(values)) for x, values in points if values]
        curves[label] = ([x for x, _ in there], [y for _, y in there])
    plots.lines(
        path,
        curves,
        xlabel="batch",
        ylabel="test accuracy",
        title=f"mnist_dnn, {EPOCHS} epochs, learning rate {LEARNING_RATE:g} at a batch of 64",
        log_x=True,
    )


EXPERIMENT = Experiment(5, "Large batches", 9, names, measure, table, plot)
