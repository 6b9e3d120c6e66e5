"""What the RPCs do: who may call, what it changes, what is answered.

Everything runs on one event loop and no method awaits between reading and changing state, so
there is no lock. Calls that must wait for news park on the bell and look again when it rings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.admission import check_job, check_software
from coordinator.course import Course
from coordinator.lifecycle import ENDED
from coordinator.membership import Shard, ShardFigures, Worker
from coordinator.run import Run
from coordinator.snapshots import ShardFile
from coordinator.store import Store
from coordinator.training import Positions
from coordinator.work import Command, Ended, MetricVariable, Report, Wait, Work
from psrpc.errors import InvalidArgument, JobFailed, NotReady, StaleGeneration
from psrpc.logs import get_logger

log = get_logger()

POLL_S = 5.0
"""How long a call may be parked. Load-bearing: clients allow four times as much."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The worker that calls and what it believes about the cluster; ``policy`` is None where it
    does not matter."""

    name: str
    incarnation: int
    generation: int
    policy: int | None = None


class Engine:
    """The calls on one run of a job. Every method is called on one event loop."""

    def __init__(self, course: Course, store: Store) -> None:
        self.course = course
        self.run = course.run
        self._members = course.members
        self._store = store

    # Shards.

    def register_shard(
        self, index: int, incarnation: int, address: str, host: str, pid: int, software: str
    ) -> Run:
        """A shard takes its place. Raises AlreadyExists, InvalidArgument or JobMismatch."""
        check_software(f"shard {index}", software)
        before = [shard.incarnation for shard in self._members.shards]
        self._members.register_shard(index, incarnation, address, host, pid, self.course.now())
        if before[index] != incarnation:
            self._store.put_incarnation(
                "shard", str(index), incarnation, self.run.generation, address
            )
            log.info("shard registered", shard=index, address=address, pid=pid, host=host)
        return self.run

    def report_shard_ready(
        self,
        index: int,
        incarnation: int,
        generation: int,
        version: int,
        initialized: bool,
        applied: tuple[Positions, Positions],
    ) -> None:
        """A shard can be served from now on. Raises StaleGeneration or InvalidArgument."""
        self._check_generation(generation)
        restored = self.run.restored
        if restored is not None and not initialized:
            raise InvalidArgument(f"shard {index} was told to restore {restored.directory}")
        self._members.shard_ready(index, incarnation, initialized, self.course.now())
        log.info("shard ready", shard=index, version=version)
        self.course.shard_ready(index, version, applied)

    def heartbeat_shard(
        self, index: int, incarnation: int, generation: int, figures: ShardFigures, failure: str
    ) -> None:
        """A shard is alive; with ``failure`` it leaves, and the job with it. Raises
        StaleGeneration."""
        self._check_generation(generation)
        self._members.shard_beat(index, incarnation, figures, self.course.now())
        if failure:
            self.course.fail(f"{self._members.shards[index]} cannot go on: {failure}")

    async def watch(self, index: int, incarnation: int, generation: int) -> AsyncIterator[Command]:
        """The commands for a shard, after those that it may have missed, until the job is over.
        Raises StaleGeneration."""
        self._check_generation(generation)
        self._members.shard_seen(index, incarnation, self.course.now())
        missed = self.course.training.missed(index)
        if self.course.phase in ENDED:
            missed.append(self.course.end())
        async for command in self.course.streams.stream(index, missed):
            yield command
        if self.course.streams.told(index):
            self._members.shard_left(index, incarnation)
            self.course.bell.ring()

    def report_snapshot(
        self, incarnation: int, generation: int, name: str, file: ShardFile, error: str
    ) -> None:
        """A shard has taken (and written) a snapshot. Raises StaleGeneration, InvalidArgument."""
        self._check_generation(generation)
        self._members.shard_seen(file.shard, incarnation, self.course.now())
        self.course.snapshot(self.course.training.snapshots.report(name, file, error))

    # Workers.

    def register_worker(
        self, incarnation: int, host: str, pid: int, device: str, job_sha256: str, software: str
    ) -> Worker:
        """A worker gets an id. Raises JobMismatch."""
        who = f"the worker with pid {pid} on {host}"
        check_software(who, software)
        check_job(self.run, who, job_sha256)
        known = len(self._members.workers)
        worker = self._members.register_worker(incarnation, host, pid, device, self.course.now())
        if len(self._members.workers) > known:
            self._store.put_incarnation(
                "worker", worker.name, incarnation, self.run.generation, host
            )
            log.info("worker registered", worker=worker.name, host=host, pid=pid, device=device)
        return worker

    def heartbeat_worker(
        self,
        name: str,
        incarnation: int,
        generation: int,
        reports: Sequence[Report],
        waiting_for: str,
    ) -> tuple[bool, Ended | None]:
        """A worker is alive: whether it must register again, and the end of the job."""
        known = self._members.worker_seen(name, incarnation, self.course.now())
        if known:
            self._members.workers[name].waiting_for = waiting_for
            if generation == self.run.generation:
                self.course.record(name, reports)
        return not known, self.course.end() if self.course.phase in ENDED else None

    async def get_cluster(self, name: str, incarnation: int) -> Sequence[Shard]:
        """The shards, once all are ready. Raises NotReady, StaleGeneration or JobFailed."""
        deadline = asyncio.get_running_loop().time() + POLL_S
        while True:
            self._members.worker(name, incarnation, self.course.now())
            if self._members.shards_ready:
                return self._members.shards
            if self.course.phase == "failed":
                raise JobFailed(self.course.reason)
            if not await self.course.bell.wait(deadline):
                # What is awaited; who hears it says "waiting for" before it.
                raise NotReady(self._members.waiting_for_shards(self.course.now()))

    async def lease_work(self, caller: Caller, reports: Sequence[Report], received: int) -> Work:
        """Records reports and finds work. Raises StaleGeneration or InvalidArgument."""
        self._admit(caller)
        self.course.record(caller.name, reports)
        return await self._await_work(caller.name, received)

    async def commit_batch(self, caller: Caller, round_number: int, report: Report) -> Work:
        """Commits an attempt and finds work. Raises StaleGeneration or InvalidArgument."""
        self._admit(caller)
        self.course.commit(caller.name, round_number, report)
        return await self._await_work(caller.name, received=0)

    def report_initialized(self, caller: Caller) -> None:
        """A worker has initialized every shard. Raises StaleGeneration."""
        self._admit(caller)
        self.course.initialized()

    def report_evaluated(
        self,
        caller: Caller,
        evaluation: str,
        task: int,
        records: int,
        states: tuple[MetricVariable, ...],
    ) -> None:
        """A worker has evaluated a task. Raises StaleGeneration or InvalidArgument."""
        self._admit(caller)
        self.course.training.evaluations.report(caller.name, evaluation, task, records, states)
        self.course.advance()

    def report_merged(self, caller: Caller, evaluation: str, values: Mapping[str, float]) -> None:
        """A worker has turned metric states into results. Raises as above."""
        self._admit(caller)
        self.course.training.merged(evaluation, values)
        self.course.advance()

    def leave_worker(self, name: str, incarnation: int, reason: str, fatal: bool) -> None:
        """A worker goes. With ``fatal`` the job fails for its reason."""
        if self._members.leave_worker(name, incarnation):
            log.info("worker left", worker=name, why=reason)
            self.course.give_back(name, lost=False)
            if fatal:
                self.course.fail(reason or f"{name} failed and gave no reason")

    async def _await_work(self, name: str, received: int) -> Work:
        deadline = asyncio.get_running_loop().time() + POLL_S
        while True:
            work = self.course.find_work(name, received)
            if not isinstance(work, Wait) or not await self.course.bell.wait(deadline):
                return work

    def _admit(self, caller: Caller) -> None:
        self._members.worker(caller.name, caller.incarnation, self.course.now())
        self._check_generation(caller.generation)
        if caller.policy is not None and caller.policy != self.run.policy:
            raise StaleGeneration(
                f"the message is of policy {caller.policy}; it is {self.run.policy}"
            )

    def _check_generation(self, generation: int) -> None:
        if generation != self.run.generation:
            raise StaleGeneration(
                f"the message is of generation {generation}; it is {self.run.generation}"
            )
