"""The course of a job: its phase, what each worker should do now, and what is waited for.

Everything runs on one event loop and no method awaits between reading and changing state, so
there is no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.bell import Bell
from coordinator.checkpoints import Checkpoints
from coordinator.curves import Curves
from coordinator.lifecycle import ENDED, Facts, Phase, next_phase
from coordinator.membership import Membership, ShardSilent
from coordinator.run import Run
from coordinator.snapshots import Failed, Taken
from coordinator.store import Store
from coordinator.streams import CommandStreams
from coordinator.training import Positions, Training
from coordinator.work import Ended, Initialize, Report, Wait, Work
from psrpc.clock import Clock
from psrpc.errors import CheckpointError
from psrpc.logs import get_logger
from psrpc.waiting import FIRST_S, Announcer

log = get_logger()

LEASE_S = 10.0
"""Silence after which a shard or worker is taken for gone."""

SHARD_LOST_S = 120.0
"""Silence after which a shard with parameters is not waited for any more; as long as shards and
workers wait for each other unless they are told otherwise."""

TICK_S = 0.5
LONG_WAIT_S = 30.0
"""A wait that has lasted so long is announced only as often."""


class Course:
    """One run of a job from its first shard to its end. ``bell`` rings at every change, ``ended``
    is set when the job is over."""

    def __init__(self, run: Run, store: Store, clock: Clock) -> None:
        self.run = run
        self.members = Membership(run.plan.shards, LEASE_S)
        self.phase: Phase = "waiting"
        self.reason = ""
        self.newest_checkpoint = run.restored.directory if run.restored else ""
        self.bell = Bell()
        self.ended = asyncio.Event()
        self.streams = CommandStreams(run.plan.shards)
        self.began = clock.now()
        self._clock = clock
        self._checkpoints = Checkpoints(run)
        self._curves = Curves(run.run_dir / "tensorboard")
        self.training = Training(
            run, store, self._curves, self.streams.send, self._checkpoints.prepare
        )
        self._announcer = Announcer(self._announce)
        self._announced = 0.0
        self._initializer: str | None = None
        self._initialized = False
        self._applied: dict[int, tuple[Positions, Positions]] = {}
        self._committing: set[asyncio.Task[None]] = set()

    # Time, and the end.

    def now(self) -> float:
        """Monotonic time, in seconds."""
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
                self.give_back(effect.worker, lost=True)
        lost = self.members.lost_shard(now, SHARD_LOST_S)
        if lost:
            self.fail(f"{lost}, and nobody else has its parameters; start again with --resume")
        progress = self.training.progress
        self._curves.flush(progress.steps.rate(now), progress.records.rate(now))
        held_up = self.held_up()
        if held_up:
            self._announcer.waiting(held_up, now)
        else:
            self._announcer.over()
        self.advance()

    def fail(self, reason: str) -> None:
        """Ends the job for everyone."""
        if self.phase not in ENDED:
            self.reason = reason
            self._enter("failed", reason)

    async def close(self) -> None:
        """Writes what is left; no call may follow."""
        await asyncio.gather(*self._committing, return_exceptions=True)
        self._curves.close()

    async def wait_until_everyone_knows(self, timeout_s: float) -> None:
        """Waits until all that are there have been told that the job is over, or for so long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._everyone_knows() and await self.bell.wait(deadline):
            pass

    # Work.

    def find_work(self, name: str, received: int) -> Work:
        """What ``name`` should do now; ``received`` as in LeaseWork."""
        if self.phase in ENDED:
            return self.end()
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

    def record(self, name: str, reports: Sequence[Report]) -> None:
        """Batches that ``name`` has done (async). Raises InvalidArgument."""
        if reports and self.phase not in ENDED:
            self.training.record(name, reports, self.now())
            self.advance()

    def give_back(self, name: str, lost: bool) -> None:
        """Gives what ``name`` holds to others; ``lost`` when it has fallen silent."""
        if self._initializer == name:
            self._initializer = None
        taken = self.training.release(name, lost)
        if taken:
            log.info("work given back", worker=name, batches_and_tasks=taken)
        self.bell.ring()

    # Phases.

    def shard_ready(self, shard: int, version: int, applied: tuple[Positions, Positions]) -> None:
        """A shard has been built, with this version and applied-set (and its skipped part)."""
        restored = self.run.restored
        sync = self.run.description.mode == "sync"
        if restored is not None and sync and version != restored.global_step:
            self.fail(
                f"shard {shard} restored version {version} from {restored.directory}, which is "
                f"of round {restored.global_step}"
            )
        if self.phase == "waiting":
            self._applied[shard] = applied
        self.advance()

    def initialized(self) -> None:
        """A worker has given every shard its parameters."""
        self._initialized = True
        self.members.initialized()
        self.advance()

    def commit(self, name: str, round_number: int, report: Report) -> None:
        """Sync: all shards hold an attempt of ``name``. Raises InvalidArgument."""
        if self.phase not in ENDED:
            self.training.commit(name, round_number, report, self.now())
            self.advance()

    def snapshot(self, outcome: Taken | Failed | None) -> None:
        """What the last report on a snapshot came to."""
        if isinstance(outcome, Failed):
            self._snapshot_failed(outcome)
        elif outcome is not None:
            task = asyncio.get_running_loop().create_task(self._complete(outcome))
            self._committing.add(task)
            task.add_done_callback(self._completed)

    def advance(self) -> None:
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
            self.advance()
        elif self.phase == "initializing" and self._initialized:
            self.training.order_first()
        self.bell.ring()

    def _enter(self, phase: Phase, reason: str) -> None:
        log.info("phase", phase=phase, why=reason)
        if self.phase == "waiting" and phase != "failed":
            applied = [self._applied[shard] for shard in range(self.run.plan.shards)]
            self.training.begin([a for a, _ in applied], [s for _, s in applied])
        self.phase = phase
        if phase in ENDED:
            self.streams.send(self.end())
            self.ended.set()
            self.bell.ring()

    def _everyone_knows(self) -> bool:
        gone = ("missing", "silent", "left")
        shards_know = all(s.state in gone for s in self.members.shards)
        return shards_know and not self.members.active_workers

    def end(self) -> Ended:
        """What everyone is told when the job is over."""
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
        self.advance()

    def _completed(self, task: asyncio.Task[None]) -> None:
        self._committing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Not foreseen; without this the job would wait for the snapshot for ever.
            self.fail(f"a snapshot could not be completed: {task.exception()!r}")

    def _snapshot_failed(self, failed: Failed) -> None:
        self._checkpoints.discard(failed.order)
        self.training.snapshot_failed(failed)
        self.advance()

    def _announce(self, reason: str, waited_s: float) -> None:
        if (
            waited_s < LONG_WAIT_S
            or waited_s - self._announced >= LONG_WAIT_S
            or (waited_s < self._announced)
        ):
            self._announced = waited_s
            log.info("waiting", waiting_for=reason, waited_s=round(waited_s))
