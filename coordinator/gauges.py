"""What is read off a job at one moment, for its curves and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from coordinator.figures import WorkerTimes, add_counts
from coordinator.membership import Shard
from coordinator.run import Followed
from coordinator.stragglers import slowness

if TYPE_CHECKING:
    from coordinator.course import Course


@dataclass(frozen=True, slots=True)
class Gauges:
    """One moment of a job. All counts are so far; those of shards and workers are of the processes
    that are there. ``times`` and ``speeds`` (examples/s) are by active worker, ``counts`` by what
    they count. ``policies`` are those that were followed, with the first."""

    now: float
    steps_per_s: float = 0.0
    examples_per_s: float = 0.0
    version_skew: int = 0
    staleness_counts: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    times: Mapping[str, WorkerTimes] = field(default_factory=lambda: MappingProxyType({}))
    speeds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    policies: tuple[Followed, ...] = ()


def read_gauges(course: Course) -> Gauges:
    """Changes nothing but the windows of the rates."""
    now, progress = course.now(), course.training.progress
    active = [w for w in course.members.workers.values() if w.state == "active"]
    return Gauges(
        now=now,
        steps_per_s=progress.steps.rate(now),
        examples_per_s=progress.records.rate(now),
        version_skew=version_skew(course),
        staleness_counts=staleness_counts(course),
        counts=counts(course),
        times={worker.name: worker.times for worker in active},
        speeds={
            worker.name: progress.workers[worker.name].records.rate(now)
            for worker in active
            if worker.name in progress.workers
        },
        policies=course.run.followed,
    )


def version_skew(course: Course) -> int:
    """Greatest minus least version of the shards, at the last moment of which all have told; 0
    until all have told twice in the present generation.

    Shards tell about once a second, each in its own moment. In between a version is taken to have
    grown in a straight line, or a fast job's shards would seem to be far apart.
    """
    shards = course.members.shards
    if not course.complete or any(
        shard.figures.generation != course.run.generation or shard.earlier is None
        for shard in shards
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
    """Updates and bytes of gradients per second over the last ten seconds; 0 from who has been
    silent for ``silence_s``, and before two signs of life of one generation."""
    rates = shard.load.rates()
    if rates is None or now - shard.told > silence_s:
        return 0.0, 0.0
    updates, nbytes = rates
    return updates, nbytes


def staleness_counts(course: Course) -> tuple[int, ...]:
    """Applied pushes by staleness, over all shards."""
    return add_counts(shard.figures.staleness_counts for shard in course.members.shards)


def counts_of_worker(course: Course, name: str) -> tuple[int, ...]:
    """Applied pushes of one worker by staleness, over all shards."""
    return add_counts(shard.figures.workers.get(name, ()) for shard in course.members.shards)


def ratios(course: Course) -> dict[str, float]:
    """How slowly each active worker computes, see :func:`coordinator.stragglers.slowness`."""
    progress = course.training.progress.workers
    return slowness(
        {
            worker.name: progress[worker.name].pace.s_per_example
            for worker in course.members.workers.values()
            if worker.state == "active" and worker.name in progress
        }
    )


def late(course: Course) -> list[str]:
    """Who is late with what all others wait for, in words."""
    schedule = course.training.schedule
    return schedule.stragglers(course.now()) if schedule is not None else []


def refused(course: Course) -> int:
    """Pushes that shards have refused, whatever for."""
    return sum(shard.figures.refused for shard in course.members.shards)


def counts(course: Course) -> dict[str, int]:
    """How often a policy has done what plain training never does, by what that is."""
    shards = [shard.figures for shard in course.members.shards]
    return {
        **asdict(course.training.tally),
        "uncompensated": sum(figures.uncompensated for figures in shards),
    }
