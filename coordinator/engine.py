"""The coordinator: events in, decisions out.

Everything runs on one event loop and no method awaits between reading and changing state, so
there is no lock. Calls that must wait for news park on the bell and look again when it rings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.admission import check_job, check_software
from coordinator.bell import Bell
from coordinator.checkpoints import Checkpoints
from coordinator.curves import Curves
from coordinator.lifecycle import ENDED, Facts, Phase, next_phase
from coordinator.membership import Membership, Shard, ShardFigures, ShardSilent, Worker
from coordinator.run import Run
from coordinator.snapshots import Failed, ShardFile, Taken
from coordinator.store import Store
from coordinator.streams import CommandStreams
from coordinator.training import Positions, Training
from coordinator.work import Command, Ended, Initialize, MetricVariable, Report, Wait, Work
from psrpc.clock import Clock
from psrpc.errors import CheckpointError, InvalidArgument, JobFailed, NotReady, StaleGeneration
from psrpc.logs import get_logger
from psrpc.waiting import FIRST_S, Announcer

log = get_logger()

HEARTBEAT_S = 1.0
LEASE_S = 10.0
POLL_S = 5.0
"""How long a call may be parked. Load-bearing: clients allow four times as much."""

TICK_S = 0.5
LONG_WAIT_S = 30.0
"""A wait that has lasted so long is announced only as often."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The worker that calls and what it believes about the cluster; ``policy`` is None where it
    does not matter."""

    name: str
    incarnation: int
    generation: int
    policy: int | None = None


class Engine:
    """One run of a job. Every method is called on one event loop."""

    def __init__(self, run: Run, store: Store, clock: Clock) -> None:
        self.run = run
        self.members = Membership(run.plan.shards, LEASE_S)
        self.phase: Phase = "waiting"
        self.reason = ""
        self.newest_checkpoint = run.restored.directory if run.restored else ""
        self.ended = asyncio.Event()
        self.began = clock.now()
        self._clock = clock
        self._store = store
        self._checkpoints = Checkpoints(run)
        self._curves = Curves(run.run_dir / "tensorboard")
        self._streams = CommandStreams(run.plan.shards)
        self.training = Training(
            run, store, self._curves, self._streams.send, self._checkpoints.prepare
        )
        self._bell = Bell()
        self._announcer = Announcer(self._announce)
        self._announced = 0.0
        self._initializer: str | None = None
        self._initialized = False
        self._applied: dict[int, tuple[Positions, Positions]] = {}
        self._committing: set[asyncio.Task[None]] = set()

    # Time, and the end.

    def now(self) -> float:
        """The engine's monotonic time, in seconds."""
        return self._clock.now()

    async def tick_forever(self) -> None:
        """Ticks until it is cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        """What time alone brings: who has fallen silent, what is awaited, curves to write."""
        now = self.now()
        for effect in self.members.tick(now):
            log.warning("silent", why=effect.reason)
            if not isinstance(effect, ShardSilent):
                self._give_back(effect.worker)
        progress = self.training.progress
        self._curves.flush(progress.steps.rate(now), progress.records.rate(now))
        held_up = self.held_up()
        if held_up:
            self._announcer.waiting(held_up, now)
        else:
            self._announcer.over()
        self._advance()

    def fail(self, reason: str) -> None:
        """Ends the job for everyone."""
        if self.phase not in ENDED:
            self.reason = reason
            self._enter("failed", reason)

    async def close(self) -> None:
        """Writes what is left; no call may follow."""
        await asyncio.gather(*self._committing)
        self._curves.close()

    async def wait_until_everyone_knows(self, timeout_s: float) -> None:
        """Waits until all that are there have been told that the job is over, or for so long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._everyone_knows() and await self._bell.wait(deadline):
            pass

    # Shards.

    def register_shard(
        self, index: int, incarnation: int, address: str, host: str, pid: int, software: str
    ) -> Run:
        """A shard takes its place. Raises AlreadyExists, InvalidArgument or JobMismatch."""
        check_software(f"shard {index}", software)
        before = [shard.incarnation for shard in self.members.shards]
        self.members.register_shard(index, incarnation, address, host, pid, self.now())
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
        self.members.shard_ready(index, incarnation, initialized, self.now())
        log.info("shard ready", shard=index, version=version)
        if (
            restored is not None
            and self.run.description.mode == "sync"
            and version != restored.global_step
        ):
            self.fail(
                f"shard {index} restored version {version} from {restored.directory}, which is "
                f"of round {restored.global_step}"
            )
        if self.phase == "waiting":
            self._applied[index] = applied
        self._advance()

    def heartbeat_shard(
        self, index: int, incarnation: int, generation: int, figures: ShardFigures
    ) -> None:
        """A shard is alive. Raises StaleGeneration."""
        self._check_generation(generation)
        self.members.shard_beat(index, incarnation, figures, self.now())

    async def watch(self, index: int, incarnation: int, generation: int) -> AsyncIterator[Command]:
        """The commands for a shard, after those that it may have missed, until the job is over.
        Raises StaleGeneration."""
        self._check_generation(generation)
        self.members.shard_seen(index, incarnation, self.now())
        missed = self.training.missed(index)
        if self.phase in ENDED:
            missed.append(self._end())
        async for command in self._streams.stream(index, missed):
            yield command
        if self._streams.told(index):
            self.members.shard_left(index, incarnation)
            self._bell.ring()

    def report_snapshot(
        self, incarnation: int, generation: int, name: str, file: ShardFile, error: str
    ) -> None:
        """A shard has taken (and written) a snapshot. Raises StaleGeneration, InvalidArgument."""
        self._check_generation(generation)
        self.members.shard_seen(file.shard, incarnation, self.now())
        outcome = self.training.snapshots.report(name, file, error)
        if isinstance(outcome, Failed):
            self._snapshot_failed(outcome)
        elif outcome is not None:
            task = asyncio.get_running_loop().create_task(self._complete(outcome))
            self._committing.add(task)
            task.add_done_callback(self._completed)

    # Workers.

    def register_worker(
        self, incarnation: int, host: str, pid: int, device: str, job_sha256: str, software: str
    ) -> Worker:
        """A worker gets an id. Raises JobMismatch."""
        who = f"the worker with pid {pid} on {host}"
        check_software(who, software)
        check_job(self.run, who, job_sha256)
        known = len(self.members.workers)
        worker = self.members.register_worker(incarnation, host, pid, device, self.now())
        if len(self.members.workers) > known:
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
        known = self.members.worker_seen(name, incarnation, self.now())
        if known:
            self.members.workers[name].waiting_for = waiting_for
            if generation == self.run.generation:
                self._record(name, reports)
        return not known, self._end() if self.phase in ENDED else None

    async def get_cluster(self, name: str, incarnation: int) -> Sequence[Shard]:
        """The shards, once all are ready. Raises NotReady, StaleGeneration or JobFailed."""
        deadline = asyncio.get_running_loop().time() + POLL_S
        while True:
            self.members.worker(name, incarnation, self.now())
            if self.members.shards_ready:
                return self.members.shards
            if self.phase == "failed":
                raise JobFailed(self.reason)
            if not await self._bell.wait(deadline):
                raise NotReady(f"waiting for {self.members.waiting_for_shards(self.now())}")

    async def lease_work(self, caller: Caller, reports: Sequence[Report], received: int) -> Work:
        """Records reports and finds work. Raises StaleGeneration or InvalidArgument."""
        self._admit(caller)
        self._record(caller.name, reports)
        return await self._await_work(caller.name, received)

    async def commit_batch(self, caller: Caller, round_number: int, report: Report) -> Work:
        """Commits an attempt and finds work. Raises StaleGeneration or InvalidArgument."""
        self._admit(caller)
        if self.phase not in ENDED:
            self.training.commit(caller.name, round_number, report, self.now())
            self._advance()
        return await self._await_work(caller.name, received=0)

    def report_initialized(self, caller: Caller) -> None:
        """A worker has initialized every shard. Raises StaleGeneration."""
        self._admit(caller)
        self._initialized = True
        self.members.initialized()
        self._advance()

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
        self.training.evaluations.report(caller.name, evaluation, task, records, states)
        self._advance()

    def report_merged(self, caller: Caller, evaluation: str, values: Mapping[str, float]) -> None:
        """A worker has turned metric states into results. Raises as above."""
        self._admit(caller)
        self.training.merged(evaluation, values)
        self._advance()

    def leave_worker(self, name: str, incarnation: int, reason: str, fatal: bool) -> None:
        """A worker goes. With ``fatal`` the job fails for its reason."""
        if self.members.leave_worker(name, incarnation):
            log.info("worker left", worker=name, why=reason)
            self._give_back(name)
            if fatal:
                self.fail(reason or f"{name} failed and gave no reason")

    # Work.

    def find_work(self, name: str, received: int) -> Work:
        """What ``name`` should do now; ``received`` as in LeaseWork."""
        if self.phase in ENDED:
            return self._end()
        if self.phase == "initializing" and not self._initialized:
            if self._initializer in (None, name):
                self._initializer = name
                return Initialize()
        elif self.phase in ("training", "finishing"):
            task = self.training.evaluations.lease(name)
            if task is not None:
                return task
            if self.phase == "training":
                active = self.members.active_workers
                work = self.training.lease(name, self.now(), received, active)
                if not isinstance(work, Wait):
                    return work
        return Wait(self.waiting_for() or "waiting for work")

    def waiting_for(self) -> str:
        """What the job waits for, in words; empty while it goes on."""
        if self.phase in ENDED:
            return ""
        training = self.training
        parts = [self.members.waiting_for_shards(self.now())]
        if self.phase != "waiting" and not self.members.active_workers:
            parts.append("a worker to register")
        elif self.phase == "initializing":
            if not self._initialized:
                parts.append(f"{self._initializer or 'a worker'} to initialize the shards")
            parts.append(training.snapshots.waiting_for())
        elif self.phase == "finishing":
            parts += [training.snapshots.waiting_for(), training.evaluations.waiting_for()]
        elif training.schedule is not None:
            parts.append(training.schedule.waiting_for())
        return "; ".join(part for part in parts if part)

    def held_up(self) -> str:
        """Like :meth:`waiting_for`, but empty while batches are being done: that every one is in
        somebody's hands is how it should be."""
        last = self.training.progress.last_done
        busy = last is not None and self.now() - last < FIRST_S
        if self.phase == "training" and busy:
            return self.members.waiting_for_shards(self.now())
        return self.waiting_for()

    async def _await_work(self, name: str, received: int) -> Work:
        deadline = asyncio.get_running_loop().time() + POLL_S
        while True:
            work = self.find_work(name, received)
            if not isinstance(work, Wait) or not await self._bell.wait(deadline):
                return work

    def _record(self, name: str, reports: Sequence[Report]) -> None:
        if reports and self.phase not in ENDED:
            self.training.record(name, reports, self.now())
            self._advance()

    def _give_back(self, name: str) -> None:
        if self._initializer == name:
            self._initializer = None
        taken = self.training.release(name)
        if taken:
            log.info("work given back", worker=name, batches_and_tasks=taken)
        self._bell.ring()

    # Phases.

    def _advance(self) -> None:
        """Takes the job as far as the facts allow, and tells those who wait."""
        if self.phase in ("training", "finishing"):
            self.training.order_due()
        if self.training.failure is not None:
            self.fail(self.training.failure)
        saving = self.training.saving
        facts = Facts(
            shards_ready=self.members.shards_ready,
            initialized=self._initialized or self.run.restored is not None,
            saved=saving.first_saved,
            trained=self.training.trained,
            final_saved=saving.final_saved,
            final_evaluated=saving.final_evaluated,
        )
        transition = next_phase(self.phase, facts)
        if transition is not None:
            self._enter(transition.phase, transition.reason)
            self._advance()
        elif self.phase == "initializing" and self._initialized:
            self.training.order_first()
        self._bell.ring()

    def _enter(self, phase: Phase, reason: str) -> None:
        log.info("phase", phase=phase, why=reason)
        if self.phase == "waiting" and phase != "failed":
            applied = [self._applied[shard] for shard in range(self.run.plan.shards)]
            self.training.begin([a for a, _ in applied], [s for _, s in applied])
        self.phase = phase
        if phase in ENDED:
            self._streams.send(self._end())
            self.ended.set()
            self._bell.ring()

    def _everyone_knows(self) -> bool:
        gone = ("missing", "silent", "left")
        shards_know = all(s.state in gone for s in self.members.shards)
        return shards_know and not self.members.active_workers

    def _end(self) -> Ended:
        return Ended(self.phase == "failed", self.reason)

    async def _complete(self, taken: Taken) -> None:
        """A snapshot has been taken by all; a checkpoint is committed first."""
        if taken.order.write:
            try:
                await asyncio.to_thread(self._checkpoints.commit, taken)
            except (CheckpointError, OSError) as error:
                self._snapshot_failed(Failed(taken.order, str(error)))
                return
            self.newest_checkpoint = f"checkpoints/{taken.order.name}"
            log.info("checkpoint committed", checkpoint=self.newest_checkpoint)
        self.training.snapshot_taken(taken)
        self._advance()

    def _completed(self, task: asyncio.Task[None]) -> None:
        self._committing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Not foreseen; without this the job would wait for the snapshot for ever.
            self.fail(f"a snapshot could not be completed: {task.exception()!r}")

    def _snapshot_failed(self, failed: Failed) -> None:
        self._checkpoints.discard(failed.order)
        self.training.snapshot_failed(failed)
        self._advance()

    def _announce(self, reason: str, waited_s: float) -> None:
        if (
            waited_s < LONG_WAIT_S
            or waited_s - self._announced >= LONG_WAIT_S
            or (waited_s < self._announced)
        ):
            self._announced = waited_s
            log.info("waiting", waiting_for=reason, waited_s=round(waited_s))

    def _admit(self, caller: Caller) -> None:
        self.members.worker(caller.name, caller.incarnation, self.now())
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
