"""Implements the RPCs on plain values: checks the caller, changes the job, returns the answer.

Everything runs on one event loop and no method awaits between reading and changing state, so there
is no lock. A method that must wait parks on the bell and tries again when that rings; each such
method has a synchronous twin that does everything except wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.core.description import JobDescription
from coordinator.core.figures import Position, WorkerHeartbeat
from coordinator.core.lifecycle import ENDED
from coordinator.core.run import Run
from coordinator.core.wording import in_words
from coordinator.core.work import MetricVariable, Report, Wait, Work
from coordinator.job.authority import Authority
from coordinator.job.job_run import JobRun
from coordinator.job.policy_settings import (
    changed_policy,
    check_restart,
    parse_settings,
    refused_while_running,
    with_cluster,
)
from coordinator.job.shard_calls import ShardCalls
from coordinator.job.worker_sessions import WorkerSessions
from coordinator.membership.members import Shard
from coordinator.membership.slice_hosts import SliceHosts
from coordinator.records.store import Store
from coordinator.transitions.holding import HoldEnd, JobHold
from psrpc.core.commands import Ended
from psrpc.core.errors import Forming, JobFailed, NotReady, StaleGeneration
from psrpc.core.policy import Policy
from psrpc.ops.logs import get_logger

log = get_logger()

POLL_S = 5.0
"""Longest time that a call stays parked. Load-bearing: clients allow four times as much."""

SHORTEST_S = 0.01
"""Shortest time that a call stays parked if its work has a due time."""


def pause_s(work: Wait, now: float) -> float:
    """Returns the seconds after which a parked call tries again without the bell, which does not
    ring for due times."""
    return POLL_S if work.until is None else max(SHORTEST_S, work.until - now)


@dataclass(frozen=True, slots=True)
class Caller:
    """The calling worker and its view of the cluster. ``name`` is empty for an unknown session;
    ``policy`` is None where it does not matter. ``ahead`` says that the worker can compute rounds
    that are decided ahead; ``clocks``, that it sends its clock with pulls and pushes (ssp);
    ``devices``, how many micro-batches it computes at once."""

    name: str
    generation: int
    policy: int | None = None
    ahead: bool = False
    clocks: bool = False
    devices: int = 1


class Engine:
    """Handles the calls on one run of a job. Every method runs on one event loop.

    Attributes:
        authority: issues the sessions, grants and signatures that shards check.
        shards: the calls of shards.
        sessions: the sessions of workers.
    """

    def __init__(
        self,
        job_run: JobRun,
        store: Store,
        authority: Authority | None = None,
        describe: Callable[[Mapping[str, str]], Awaitable[JobDescription]] | None = None,
    ) -> None:
        """``describe`` describes the job with other settings; None if nothing would start the
        cluster again with them."""
        self.job_run = job_run
        self._describe = describe
        self.authority = authority or Authority()
        self.shards = ShardCalls(job_run)
        self.sessions = WorkerSessions(job_run, store, self.authority)
        self._members = job_run.members
        self._hosts: SliceHosts | None = None
        if hosted := job_run.run.hosted:
            places, workers = self._members.places, self._members.workers
            places.hosted = hosted
            self._hosts = SliceHosts(places, workers, job_run.now())

    @property
    def run(self) -> Run:
        """The run, as of the present generation."""
        return self.job_run.run

    def heartbeat_worker(self, name: str, beat: WorkerHeartbeat) -> tuple[bool, Ended | None]:
        """Records a worker's heartbeat. Returns whether it must register again, and the end of the
        job if it has ended. ``beat`` holds vouched reports."""
        now = self.job_run.now()
        known = self._members.worker_seen(name, now)
        if known:
            worker = self._members.workers[name]
            worker.transports = beat.transports
            worker.waiting_for = beat.waiting_for
            worker.position = worker.position.then(replace(beat.position or Position(), since=now))
            if self.job_run.stands(beat.generation):
                self.job_run.record(name, beat.reports)
            if beat.times is not None:
                worker.times = beat.times
                self.job_run.training.progress.beat(name, beat.times.compute, now)
            if worker.reaches(beat.unreachable or {}, beat.generation, now):
                self.job_run.stuck.look(now)
                self.job_run.advance()
        return not known, self.job_run.end() if self.job_run.phase in ENDED else None

    def slices_to_host(self, name: str) -> list[int]:
        """Returns the slices that worker ``name`` is to host and has not registered."""
        ends = self.job_run.phase in ("stopping", *ENDED)
        if self._hosts is None or ends or name not in self._members.workers:
            return []
        slices = self._hosts.look(name, self.job_run.now())
        for one in self._hosts.news():
            log.info("slice assigned", shard=one.shard, worker=one.worker, why=one.why)
        return slices

    def cluster_now(self, name: str | None) -> Sequence[Shard]:
        """Returns the shards, once all have begun the present generation. Raises NotReady while a
        shard is away, Forming while all are connected but not ready, StaleGeneration or
        JobFailed."""
        if name is not None:
            self._members.worker(name)
        if self.job_run.complete:
            return self._members.places.shards
        if self.job_run.end().failed:
            raise JobFailed(self.job_run.reason)
        # Callers put "waiting for" before these words.
        awaited = self.job_run.waiting_for() or "a generation to be formed"
        raise NotReady(awaited) if self._members.places.away else Forming(awaited)

    async def get_cluster(self, name: str | None) -> Sequence[Shard]:
        """Like :meth:`cluster_now`, but waits a while for a worker. ``name`` is None for a caller
        that only reads shards; such a caller waits by itself."""
        if name is None:
            return self.cluster_now(name)
        self._members.worker_seen(name, self.job_run.now())
        deadline = asyncio.get_running_loop().time() + POLL_S
        while True:
            try:
                return self.cluster_now(name)
            except NotReady:
                if not await self.job_run.bell.wait(deadline):
                    raise

    def lease_now(self, caller: Caller, reports: Sequence[Report], received: int) -> Work:
        """Records reports and finds work. Raises StaleGeneration or InvalidArgument."""
        self._members.worker_seen(caller.name, self.job_run.now())
        if self._admit(caller):
            self.job_run.record(caller.name, reports)
        return self._find(caller, received)

    def commit_now(self, caller: Caller, round_number: int, report: Report) -> Work:
        """Commits an attempt and finds work. Raises StaleGeneration or InvalidArgument."""
        self._members.worker_seen(caller.name, self.job_run.now())
        if self._admit(caller):
            self.job_run.commit(caller.name, round_number, report)
        return self._find(caller, received=0)

    def report_initialized(self, caller: Caller) -> None:
        """Records that a worker has initialized every shard. Raises StaleGeneration."""
        if self._admit(caller) and self.job_run.initializer == caller.name:
            self.job_run.initialized()

    def report_evaluated(
        self,
        caller: Caller,
        evaluation: str,
        task: int,
        records: int,
        states: tuple[MetricVariable, ...],
    ) -> None:
        """Records an evaluated task. Raises StaleGeneration or InvalidArgument."""
        if self._admit(caller):
            counts = self.job_run.training.orders.evaluations.report(
                caller.name, evaluation, task, records, states
            )
            if not counts:
                # A repetition, or the results of a task that was not leased to this worker.
                log.info("not counted", worker=caller.name, evaluation=evaluation, task=task)
            self.job_run.advance()

    def report_merged(self, caller: Caller, evaluation: str, values: Mapping[str, float]) -> None:
        """Records results that a worker computed from metric states. Raises StaleGeneration or
        InvalidArgument."""
        if self._admit(caller):
            self.job_run.checkpoints.evaluated(caller.name, evaluation, values)
            self.job_run.advance()

    def set_policy(self, settings: Sequence[str]) -> tuple[int, Policy]:
        """Requests a change of policy by ``key=value`` settings; returns the policy and its number.
        Raises InvalidJob, NotReady or JobFailed."""
        values = parse_settings(settings)
        policy = changed_policy(self.run.settings, values, self.run.description)
        return self.job_run.changes.ask(policy), policy

    async def restart_with(self, asked: Mapping[str, str]) -> Mapping[str, str]:
        """Requests that the cluster starts again with other processes, once the job, described with
        the settings ``asked``, shows nothing that speaks against it. Returns all settings that the
        run then has beside those of its start; empty if nothing would change. Raises InvalidJob,
        NotReady or JobFailed; nothing has changed then."""
        changes = self.job_run.changes
        if self._describe is None:
            key, value = next(iter(asked.items()))
            raise refused_while_running(f"{key}={value}", key)
        changed = with_cluster(self.run.changed, asked)
        if changes.switch is None or changes.switch.changed != changed:
            changes.check_free("processes")
            if changes.described:
                raise NotReady(f"{changes.described} is being checked; try again after that")
            changes.described = in_words(changed)
            try:
                described = await self._describe(changed)
            finally:
                changes.described = ""
            # The policy may have changed meanwhile.
            check_restart(self.run, described)
            if described.document == self.run.description.document:
                return {}
        changes.ask_restart(changed)
        return changed

    async def await_hold(self, after: int) -> JobHold | None:
        """Waits a while for a hold, or the end of the job; see :meth:`Holding.look`."""
        deadline = asyncio.get_running_loop().time() + POLL_S
        while True:
            hold = self.job_run.holding.look(after)
            over = self.job_run.phase in ENDED or self.job_run.drained
            if hold is not None or over or not await self.job_run.bell.wait(deadline):
                return hold

    async def end_hold(self, end: HoldEnd) -> None:
        """Ends the present hold; see :meth:`Holding.end`."""
        deadline = asyncio.get_running_loop().time() + POLL_S
        while not self.job_run.holding.end(end):
            if not await self.job_run.bell.wait(deadline):
                raise NotReady(f"checkpoint {end.restore} is still being looked at")

    async def await_work(self, caller: Caller, received: int) -> Work:
        """Waits a while for work for a caller that had to wait. Raises StaleGeneration."""
        # Work may have come before this began to run.
        found = self._find(caller, received)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + POLL_S
        while isinstance(found, Wait):
            until = min(deadline, loop.time() + pause_s(found, self.job_run.now()))
            if not await self.job_run.bell.wait(until) and until == deadline:
                break
            found = self._find(caller, received)
        return found

    def _find(self, caller: Caller, received: int) -> Work:
        """Finds work, if the caller may still have any: the job may have changed while it
        waited."""
        if not self._admit(caller):
            return self.job_run.end()
        self._members.workers[caller.name].asked = True
        can = caller.ahead, caller.clocks, caller.devices
        return self.job_run.assignments.find(caller.name, received, *can)

    def _admit(self, caller: Caller) -> bool:
        """Returns whether the job still runs. Raises StaleGeneration if the session is unknown or
        the caller works on a past generation or policy."""
        self._members.worker(caller.name)
        if self.job_run.phase in ENDED:
            return False
        self.job_run.check_standing(caller.generation)
        if caller.policy is not None and caller.policy != self.run.policy:
            raise StaleGeneration(
                f"the message is of policy {caller.policy}; it is {self.run.policy}"
            )
        return True
