"""The metrics of a job for Prometheus: ``coordinator_*``, derived from its status."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from coordinator.core.figures import CAUSES
from coordinator.core.lifecycle import Phase
from psrpc.metrics.exporter import Family, histogram
from psrpc.v1 import coordinator_pb2 as pb

_GAUGES: dict[str, tuple[str, str]] = {
    "global_step": ("global_step", "Updates of the job so far."),
    "total_steps": ("total_steps", "Updates of the job when it is done."),
    "epoch": ("epoch", "That is trained; counts from 1, and is 0 before."),
    "epochs": ("epochs", "Of the job."),
    "generation": ("generation", "Counts recoveries."),
    "policy": ("policy", "Counts changes of the consistency policy."),
    "steps_per_second": ("steps_per_s", "Global steps, over the last ten seconds."),
    "batches_per_second": ("batches_per_s", "Micro-batches, over the last ten seconds."),
    "examples_per_second": ("examples_per_s", "Over the last ten seconds."),
    "version_skew": ("version_skew", "Greatest minus least version of the shards."),
    "staleness_mean_versions": ("mean_staleness", "Over all gradients that were applied."),
    "waited_seconds": ("waited_s", "How long the job has waited for what it waits for."),
    "insecure": ("insecure", "Whether the job may speak in plaintext with other machines."),
}

_WHERE_KNOWN = {
    "checkpoint_age_seconds": ("checkpoint_age_s", "Of the newest."),
    "checkpoint_interval_seconds": (
        "checkpoint_interval_s",
        "Longest time between two checkpoints while all goes well.",
    ),
    "free_bytes": ("free_nbytes", "On the disk of the run directory."),
}
"""Negative in the status where they are not known."""

_COUNTERS = {
    "examples": ("examples", "Examples that were trained."),
    "batches": ("batches", "Micro-batches that were done."),
    "batches_skipped": ("skipped", "Batches whose gradient was not finite."),
    "batches_failed": ("failed", "Batches whose worker was lost; others did them again."),
    "batches_too_stale": ("too_stale", "Batches done again, their gradient being too stale."),
    "batches_speculative": ("speculative", "Micro-batches given to an idle worker as well."),
    "commits_superseded": ("superseded", "Commits that another attempt came before."),
    "commits_late": ("late", "Commits of gradients of an older round."),
    "rounds_overdue": ("overdue", "Rounds that lasted longer than round_deadline_s."),
    "workers_joined": ("workers_joined", "Workers that have registered."),
    "workers_departed": ("workers_departed", "Workers that have left or were taken for gone."),
    "pushes_refused": ("refused", "Pushes that shards have refused."),
}

_OF_WORKERS: dict[str, tuple[type[Family], str, str]] = {
    "batches": (CounterMetricFamily, "batches", "Batches that it has done."),
    "batches_per_second": (GaugeMetricFamily, "batches_per_s", "Over the last ten seconds."),
    "examples_per_second": (GaugeMetricFamily, "examples_per_s", "Over the last ten seconds."),
    "silent_seconds": (GaugeMetricFamily, "silent_s", "Since its last sign of life."),
    "slowness": (GaugeMetricFamily, "slowness", "Its time per example, by the median of all."),
}

_OF_SHARDS: dict[str, tuple[type[Family], str, str]] = {
    "version": (GaugeMetricFamily, "version", "Updates, as the parameters say."),
    "silent_seconds": (GaugeMetricFamily, "silent_s", "Since its last sign of life."),
    "updates_per_second": (GaugeMetricFamily, "updates_per_s", "Over the last ten seconds."),
    "gradient_bytes_per_second": (
        GaugeMetricFamily,
        "gradient_nbytes_per_s",
        "Of gradients that came, over the last ten seconds.",
    ),
    "memory_bytes": (GaugeMetricFamily, "memory_nbytes", "Resident memory of its process."),
}


def families(status: pb.GetJobStatusResponse) -> Iterator[Family]:
    """Yields all metrics of a job, from the same ``status`` as ``coordinator status`` shows."""
    info = GaugeMetricFamily("coordinator_info", "Always 1.", labels=("name", "run", "version"))
    info.add_metric((status.job, status.run_id, status.software), 1)
    yield info
    yield _one_of("phase", "1 for what the job does now.", get_args(Phase), status.phase)
    for name, (field, meaning) in _GAUGES.items():
        yield GaugeMetricFamily(f"coordinator_{name}", meaning, value=getattr(status, field))
    for name, (field, meaning) in _COUNTERS.items():
        yield CounterMetricFamily(f"coordinator_{name}", meaning, value=getattr(status, field))
    yield from _where_known("loss", "Training loss of late.", status.loss)
    for name, (field, meaning) in _WHERE_KNOWN.items():
        value = getattr(status, field)
        yield from _where_known(name, meaning, value if value >= 0 else math.nan)
    yield histogram(
        "coordinator_staleness_versions",
        "Of all gradients that were applied, over the present processes of all shards.",
        [((), status.staleness_counts)],
        (),
    )
    yield _evaluations(status.evaluations)
    yield _by_state("shards", "Shards by state.", (shard.state for shard in status.shards))
    yield _by_state("workers", "Workers by state.", (worker.state for worker in status.workers))
    yield from _of_workers(status)
    for name, (kind, field, meaning) in _OF_SHARDS.items():
        family = kind(f"coordinator_shard_{name}", meaning, labels=("shard",))
        for shard in status.shards:
            family.add_metric((str(shard.shard),), getattr(shard, field))
        yield family


def _of_workers(status: pb.GetJobStatusResponse) -> Iterator[Family]:
    for name, (kind, field, meaning) in _OF_WORKERS.items():
        family = kind(f"coordinator_worker_{name}", meaning, labels=("worker",))
        for worker in status.workers:
            family.add_metric((worker.worker,), getattr(worker, field))
        yield family
    seconds = CounterMetricFamily(
        "coordinator_worker_seconds",
        "Time of a worker by what it went to.",
        labels=("worker", "cause"),
    )
    for worker in status.workers:
        for cause in CAUSES:
            seconds.add_metric((worker.worker, cause), getattr(worker.times, cause))
    yield seconds


def _where_known(name: str, meaning: str, value: float) -> Iterator[Family]:
    if math.isfinite(value):
        yield GaugeMetricFamily(f"coordinator_{name}", meaning, value=value)


def _one_of(name: str, meaning: str, choices: Iterable[str], chosen: str) -> Family:
    family = GaugeMetricFamily(f"coordinator_{name}", meaning, labels=(name,))
    for choice in choices:
        family.add_metric((choice,), choice == chosen)
    return family


def _by_state(name: str, meaning: str, states: Iterable[str]) -> Family:
    family = GaugeMetricFamily(f"coordinator_{name}", meaning, labels=("state",))
    for state, count in Counter(states).items():
        family.add_metric((state,), count)
    return family


def _evaluations(found: Iterable[pb.EvaluationResult]) -> Family:
    family = GaugeMetricFamily(
        "coordinator_evaluation", "The newest result.", labels=("evaluation", "metric")
    )
    newest = {result.evaluation: result for result in found}
    for result in newest.values():
        for metric, value in result.results.items():
            family.add_metric((result.evaluation, metric), value)
    return family
