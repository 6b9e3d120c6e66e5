"""Figures of a job at one moment, for its curves and its summary."""

from __future__ import annotations

from dataclasses import asdict

from coordinator.core.figures import add_counts
from coordinator.membership.members import Shard
from coordinator.membership.stragglers import slowness
from coordinator.records.curves import Gauges
from coordinator.training.job_state import JobState


def read_gauges(job: JobState) -> Gauges:
    """Reads the gauges; changes only the windows of the rates."""
    now, progress = job.now(), job.training.progress
    active = [w for w in job.members.workers.values() if w.state == "active"]
    return Gauges(
        now=now,
        steps_per_s=progress.steps.rate(now),
        examples_per_s=progress.records.rate(now),
        version_skew=version_skew(job),
        staleness_counts=staleness_counts(job),
        counts=counts(job),
        times={worker.name: worker.times for worker in active},
        speeds={
            worker.name: progress.workers[worker.name].records.rate(now)
            for worker in active
            if worker.name in progress.workers
        },
        policies=job.run.followed,
    )


def version_skew(job: JobState) -> int:
    """Returns the greatest minus the least version of the shards, at the last moment that all
    reports cover; 0 until all have reported twice in the present generation.

    Shards report about once a second, at different moments. Versions in between are interpolated
    linearly; otherwise the shards of a fast job would seem far apart.
    """
    shards = job.members.places.shards
    if not job.complete or any(
        shard.figures.generation != job.run.generation or shard.earlier is None for shard in shards
    ):
        return 0
    moment = min(shard.told for shard in shards)
    versions = [_version(shard, moment) for shard in shards]
    return round(max(versions) - min(versions))


def _version(shard: Shard, moment: float) -> float:
    assert shard.earlier is not None
    then, before = shard.earlier
    version = before.version
    if shard.told <= then:
        return shard.figures.version
    part = max(0.0, moment - then) / (shard.told - then)
    return version + part * (shard.figures.version - version)


def shard_rates(shard: Shard, now: float, silence_s: float) -> tuple[float, float]:
    """Returns updates and gradient bytes per second over the last ten seconds; 0 for a shard that
    has been silent for ``silence_s``, and before two heartbeats of one generation."""
    rates = shard.load.rates()
    if rates is None or now - shard.told > silence_s:
        return 0.0, 0.0
    updates, nbytes = rates
    return updates, nbytes


def staleness_counts(job: JobState) -> tuple[int, ...]:
    """Counts applied pushes by staleness, over all shards."""
    return add_counts(shard.figures.staleness_counts for shard in job.members.places.shards)


def counts_by_worker(job: JobState) -> dict[str, tuple[int, ...]]:
    """Counts applied pushes by worker and staleness, over all shards."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for shard in job.members.places.shards:
        for name, its in shard.figures.workers.items():
            found.setdefault(name, []).append(its)
    return {name: add_counts(histograms) for name, histograms in found.items()}


def ratios(job: JobState) -> dict[str, float]:
    """Returns the slowness of each active worker's computing, see
    :func:`coordinator.membership.stragglers.slowness`."""
    progress = job.training.progress.workers
    return slowness(
        {
            worker.name: progress[worker.name].pace.s_per_example
            for worker in job.members.workers.values()
            if worker.state == "active" and worker.name in progress
        }
    )


def late(job: JobState) -> list[str]:
    """Says which workers are late with micro-batches that all others wait for."""
    schedule = job.training.schedule
    return schedule.stragglers(job.now()) if schedule is not None else []


def refused(job: JobState) -> int:
    """Counts pushes that shards have refused for any reason."""
    return sum(shard.figures.refused for shard in job.members.places.shards)


def counts(job: JobState) -> dict[str, int]:
    """Counts the effects that only some policies have, by name."""
    shards = [shard.figures for shard in job.members.places.shards]
    tally = asdict(job.training.tally)
    if job.run.description.exact:
        del tally["summed"]
    return {**tally, "uncompensated": sum(figures.uncompensated for figures in shards)}
