"""The invariant of ssp: no gradient is computed without the steps of the others that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from coordinator.core.work import Train
from coordinator.job.job_run import JobRun
from coordinator.schedule.ledger import Ledger
from pserver.core.requests import PullRequest, PushRequest, Values
from psrpc.core.commands import WorkerClock

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.shard import Shard

Member: TypeAlias = tuple[int, str]
"""A generation and a worker."""

Place: TypeAlias = tuple[str, int, str]
"""A shard's process, a generation and a worker."""


@dataclass(slots=True)
class _Leased:
    """A worker's entry, and its steps at the end of what it is leased."""

    entry: int
    began: int
    steps: int


@dataclass(slots=True)
class _There:
    """A worker on one shard: by entry what it has done, by version what it has waited for."""

    reached: dict[int, int] = field(default_factory=dict)
    served: dict[int, int] = field(default_factory=dict)


class ClockBook:
    """Counts the steps of workers by their leases, and sees what shards take and answer."""

    def __init__(self, cluster: Cluster, fail: Callable[[str], NoReturn]) -> None:
        """``fail`` raises Violation."""
        self._cluster = cluster
        self._fail = fail
        self._leased: dict[Member, _Leased] = {}
        self._steps: dict[tuple[int, int], tuple[int, int]] = {}
        """By generation and attempt: the entry of its worker, and the clock that it begins at."""
        self._there: dict[Place, _There] = {}
        self._job_run: JobRun | None = None
        self._ledger: Ledger | None = None
        self._generation = 0

    def handed_out(self, job_run: JobRun, worker: str, work: Train) -> None:
        """The coordinator leases: a worker that enters does not fall behind where it was."""
        clock, generation = work.clock, job_run.run.generation
        self._job_run, self._ledger, self._generation = job_run, job_run.training.ledger, generation
        if clock is None:
            return
        known = self._leased.get((generation, worker))
        if known is None or known.entry != clock.entry:
            if known is not None and (clock.entry < known.entry or clock.steps < known.steps):
                self._fail(f"{worker} enters as {clock} after {known}")
            known = _Leased(clock.entry, clock.steps, clock.steps)
            self._leased[generation, worker] = known
        for attempt in work.batches:
            if (generation, attempt.number) not in self._steps:
                self._steps[generation, attempt.number] = known.entry, known.steps
                known.steps += 1

    def came(self, shard: Shard, request: PullRequest | PushRequest, clock: WorkerClock) -> None:
        """A worker has come to a shard, which others have to wait for from now on."""
        there = self._at(shard, request)
        there.reached.setdefault(clock.entry, clock.steps)

    def check_accepted(self, shard: Shard, push: PushRequest) -> None:
        """A gradient counts: what it was computed from was served to its worker once that was not
        too far ahead for this very step."""
        known = self._steps.get((push.fence.generation, push.attempt.number))
        if known is None:
            return
        entry, begins = known
        there = self._at(shard, push)
        waited = there.served.get(push.base_version, -1)
        if waited < begins:
            self._fail(
                f"{push.worker} pushes step {begins} to {shard} as of version "
                f"{push.base_version}, for which it has waited as for step {waited}"
            )
        self.count(shard, push)
        awaited, ledger = self._awaited(push.fence.generation), self._ledger
        if awaited is None or ledger is None or ledger._leased.get(push.batch) != push.worker:
            return
        member = self._job_run.members.workers.get(push.worker) if self._job_run else None
        if member is None or member.state != "active":
            # It was revoked, which this shard has not heard of yet.
            return
        if awaited.get(push.worker) != entry:
            self._fail(f"{push.worker} does {push.attempt} of ssp, and others do not wait for it")

    def count(self, shard: Shard, push: PushRequest) -> None:
        """A shard has a worker's batch: that was a step."""
        known = self._steps.get((push.fence.generation, push.attempt.number))
        if known is not None:
            entry, begins = known
            reached = self._at(shard, push).reached
            reached[entry] = max(reached.get(entry, 0), begins + 1)

    def check_served(
        self,
        shard: Shard,
        request: PullRequest | PushRequest,
        values: Values,
        clock: WorkerClock | None,
    ) -> None:
        """A shard serves values for a worker's next step: it has the steps of all that others wait
        for, and that have come to it, but the last s."""
        generation, there = request.fence.generation, self._at(shard, request)
        staleness = self._cluster.invariants.policies.settings(request.fence.policy).staleness
        if staleness is None or clock is None:
            return
        mine = there.reached[clock.entry]
        there.served[values.version] = max(mine, there.served.get(values.version, 0))
        awaited = self._awaited(generation)
        if awaited is None or awaited.get(request.worker) != clock.entry:
            return
        for worker, entered in awaited.items():
            other = self._there.get((repr(shard), generation, worker))
            theirs = None if other is None else other.reached.get(entered)
            if theirs is not None and mine - theirs > staleness:
                self._fail(
                    f"{shard} serves {request.worker} for step {mine}, and {worker}, which"
                    f" others wait for, has done {theirs}; at most {staleness} ahead"
                )

    def _awaited(self, generation: int) -> dict[str, int] | None:
        """The entries of those that others wait for, as the coordinator sees it; None if there is
        none that knows."""
        clocks = None if self._ledger is None else self._ledger.clocks
        if clocks is None or self._generation != generation:
            return None
        return {clock.worker: clock.entry for clock in clocks.awaited.workers}

    def _at(self, shard: Shard, request: PullRequest | PushRequest) -> _There:
        place = repr(shard), request.fence.generation, request.worker
        return self._there.setdefault(place, _There())
