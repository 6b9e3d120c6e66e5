"""Experiment 4: ``mnist_dnn`` at a learning rate that plain asynchronous training does not survive.

Staleness acts like more momentum (Mitliagkas et al. 2016), and 0.95 leaves no room for more.
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
from benchmarks.table import MISSING, markdown, number
from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import PsError
from psrpc.files.run_paths import read_summary
from psrpc.v1 import coordinator_pb2 as pb

JOB = ROOT / "examples" / "mnist_dnn.py"

WORKERS, EPOCHS, TARGET = 3, 8, 0.975
LIMIT_S, LOOK_S = 300.0, 0.25

RATE = ("optimizer.learning_rate=0.01", "optimizer.momentum=0.95")
"""The example's own, said aloud: it is the same in all runs."""

POLICIES: Mapping[str, tuple[str, ...]] = {
    "async": ("mode=async",),
    "sync K=3": ("mode=sync", "replicas=3"),
    "async, staleness_lr=inverse": ("mode=async", "staleness_lr=inverse"),
    "async, max_staleness=1": ("mode=async", "max_staleness=1"),
    "async, delay_compensation=constant": ("mode=async", "delay_compensation=constant"),
    "async, delay_compensation=adaptive": ("mode=async", "delay_compensation=adaptive"),
    "ssp s=1": ("mode=ssp", "staleness=1"),
    "ssp s=1, staleness_lr=inverse": ("mode=ssp", "staleness=1", "staleness_lr=inverse"),
    "sync K=3, after 1 epoch async inverse": (
        *("mode=sync", "replicas=3", "then=async", "then_after=1", "staleness_lr=inverse"),
    ),
}

SHOWN = 2
"""Warnings of one run that the page shows."""


def names(small: bool) -> list[str]:
    """Of policies."""
    return list(POLICIES)[: 2 if small else None]


def measure(name: str, small: bool) -> Figures:
    """Trains on a real cluster and watches its status meanwhile."""
    epochs = 1 if small else EPOCHS
    settings = (*RATE, *POLICIES[name], f"epochs={epochs}")
    watched = Watched()
    with Cluster(JOB, shards=2, workers=WORKERS, settings=settings) as cluster:
        watched.follow(cluster)
        summary = read_summary(cluster.run_dir)
    if not summary:
        raise RunFailed("there is no summary")
    done = summary["phase"] == "done"
    return {
        "phase": summary["phase"],
        "reason": summary["reason"],
        "accuracy": summary["eval"].get("accuracy") if done else None,
        "train_s": summary["train_s"],
        "batches": summary["batches"],
        "mean_staleness": summary["mean_staleness"],
        "summary_warnings": summary["warnings"],
        **watched.figures(),
    }


class Watched:
    """Status of a job, and when it was read."""

    def __init__(self) -> None:
        self._warnings: dict[str, int] = {}
        self._loss: list[tuple[int, float]] = []
        self._ended_at = 0

    def follow(self, cluster: Cluster) -> None:
        """Looks until the job ends.

        Raises:
            RunFailed: it took too long.
        """
        deadline = time.monotonic() + LIMIT_S
        with CoordinatorClient(cluster.address(), cluster.security()) as client:
            while cluster.running:
                if time.monotonic() > deadline:
                    raise RunFailed(f"not done after {LIMIT_S:.0f} s")
                with suppress(PsError):
                    self.note(client.get_job_status())
                time.sleep(LOOK_S)

    def note(self, status: pb.GetJobStatusResponse) -> None:
        """One look."""
        for warning in status.warnings:
            self._warnings.setdefault(warning, status.batches)
        if status.phase == "training" and status.batches:
            self._loss.append((status.batches, status.loss))
        self._ended_at = max(self._ended_at, status.batches)

    def figures(self) -> dict[str, Any]:
        """``warned``: each warning with the micro-batches done when it was first seen."""
        return {
            "warned": [[batches, text] for text, batches in self._warnings.items()],
            "loss": self._loss,
        }


def table(found: Found) -> str:
    """A row for each policy."""
    rows = []
    for name in POLICIES:
        figures = have(found).get(name)
        if figures is None:
            continue
        accuracy = figures["accuracy"]
        warned = figures["warned"]
        rows.append(
            [
                name,
                "trained" if figures["phase"] == "done" else "stopped by the guard",
                MISSING if accuracy is None else f"{accuracy:.4f}",
                "" if accuracy is None else "yes" if accuracy >= TARGET else "no",
                number(figures["train_s"]),
                str(figures["batches"]),
                f"{figures['mean_staleness']:.2f}",
                f"batch {warned[0][0]}" if warned else "no",
            ]
        )
    header = ["policy", "ended", "test accuracy", f"≥ {TARGET:g}", "training, s", "batches"]
    return markdown([*header, "mean staleness", "first warning"], rows) + _said(found)


def _said(found: Found) -> str:
    lines = []
    for name, figures in have(found).items():
        if figures["phase"] != "done":
            warned = figures["warned"]
            lines += [f"- {name}, after {n} batches: {text}" for n, text in warned[:SHOWN]]
            if len(warned) > SHOWN:
                lines.append(f"- and {len(warned) - SHOWN} more warnings")
            lines.append(f"- {name}, at the end: {figures['reason']}")
    return ("\n\nWhat status said:\n\n" + "\n".join(lines) if lines else "") + misses(found)


def plot(found: Found, path: Path) -> None:
    """The loss over time."""
    curves = {}
    for name in POLICIES:
        points = have(found).get(name, {}).get("loss", [])
        # A loss that is no number has no place in a picture.
        there = [(x, y) for x, y in points if y == y and y < 1e3]
        curves[name] = ([x for x, _ in there], [min(y, 10.0) for _, y in there])
    plots.lines(
        path,
        {name: curve for name, curve in curves.items() if curve[0]},
        xlabel="micro-batches",
        ylabel="training loss, cut at 10",
        title="mnist_dnn, learning rate 0.01, momentum 0.95, 3 workers",
    )


EXPERIMENT = Experiment(
    4, "A learning rate that plain async does not survive", 8, names, measure, table, plot
)
