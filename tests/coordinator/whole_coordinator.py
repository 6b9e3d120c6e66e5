"""A whole coordinator without a network or an event loop, and shards that do as they are told."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.core.figures import WorkerRegistration
from coordinator.core.run import Followed, Run
from coordinator.core.work import InitializationWork, Report, Round, Train, Work
from coordinator.job.engine import Caller, Engine
from coordinator.job.job_run import JobRun
from coordinator.records.curves import Curves
from coordinator.records.store import Store
from coordinator.records.stored_values import GENERATION, POLICIES, SINCE
from coordinator.training.streams import Stream
from psrpc import SOFTWARE
from psrpc.core.commands import Attempt, Begin, Command, Decision, Ended, Revocation, SnapshotOrder
from psrpc.core.intervals import IntervalSet
from psrpc.core.shard_reports import (
    HeldReport,
    HeldState,
    Positions,
    ShardFigures,
    ShardFile,
    ShardHeartbeat,
    ShardRegistration,
    SnapshotReport,
)
from psrpc.ops.clock import ManualClock
from tests.coordinator.builders import SHA, QueuedDisk, make_run


class Coordinator:
    """One coordinator process after another on the same run directory."""

    def __init__(
        self, tmp_path: Path, shards: int = 2, attended: bool = False, **changes: Any
    ) -> None:
        self._attended = attended
        self._run = make_run(tmp_path, shards=shards, **changes)
        self.clock = ManualClock()
        self.seen = (0, 0)
        """Generation and step that an onlooker saw last."""
        self._open(self._run)

    def _open(self, run: Run) -> None:
        self.store = Store(run.run_dir / "ledger.sqlite")
        self.store.open()
        run = replace(
            run,
            generation=self.store.get(GENERATION) or 0,
            since=self.store.get(SINCE) or 0,
            policies=tuple(Followed.from_json(f) for f in self.store.get(POLICIES) or ()),
        )
        self.disk = QueuedDisk(run)
        self.job_run = JobRun(
            run, self.store, self.clock, self.disk, _no_curves(), attended=self._attended
        )
        self.engine = Engine(self.job_run, self.store)
        self.shards: list[Shard] = []

    def restart(self) -> None:
        """Dies, with all connections and the work on the disk, and comes again."""
        self.store.close()
        self._open(self._run)

    def add(self, index: int, incarnation: int) -> Shard:
        """A shard process that registers and watches."""
        shard = Shard(self, index, incarnation)
        shard.connect()
        return shard

    def settle(self) -> None:
        """All shards do what they are told and the disk what it was asked for, until nothing is
        left to do."""
        busy = True
        while busy:
            busy = bool(self.disk.queue)
            self.disk.work()
            for shard in self.shards:
                busy |= shard.obey() > 0
            self.look()

    def look(self) -> None:
        """Looks on: together, generation and step never go back."""
        assert self.job_run.standing >= self.seen
        self.seen = self.job_run.standing

    def tick(self, seconds: float = 0.5) -> None:
        self.clock.advance(seconds)
        self.job_run.tick()


class Shard:
    """A shard without parameters. ``obey`` carries out what has come."""

    def __init__(self, coordinator: Coordinator, index: int, incarnation: int) -> None:
        self.coordinator = coordinator
        self.index = index
        self.incarnation = incarnation
        self.generation, self.version, self.initialized = 0, 0, False
        self.applied: Positions = {}
        self.begins: list[Begin] = []
        self.revoked = 0
        self.error = ""
        self.ended: Ended | None = None
        self.stream: Stream | None = None

    def connect(self) -> None:
        """Registers and watches, with what it holds."""
        engine = self.coordinator.engine
        where = (self.index, self.incarnation, f"h:{self.index}", "h", 1)
        hosted = engine.run.description.hosted
        engine.shards.register(ShardRegistration(*where, SOFTWARE, int(hosted)))
        self.watch()

    def watch(self) -> None:
        holding = HeldState(self.incarnation, self.generation, self.initialized, self.version)
        self.stream = self.coordinator.engine.shards.watch_now(self.index, holding)
        self.coordinator.shards.append(self)

    def kill(self) -> None:
        """Its process is gone, and with it the connection."""
        assert self.stream is not None
        self.coordinator.shards.remove(self)
        self.coordinator.engine.shards.watch_ended(self.stream)

    def next(self) -> Command | None:
        assert self.stream is not None
        return self.stream.next()

    def obey(self) -> int:
        """How many commands it has carried out."""
        count = 0
        while (command := self.next()) is not None:
            self.carry_out(command)
            count += 1
        return count

    def carry_out(self, command: Command) -> None:
        match command:
            case Begin():
                self.begin(command)
            case Decision():
                if command.round == self.version and command.generation == self.generation:
                    self.apply(command)
            case SnapshotOrder():
                # The directory goes when the generation does.
                with contextlib.suppress(FileNotFoundError):
                    self.take(command)
            case Revocation():
                self.revoked = command.number
                self.beat()
            case Ended():
                self.ended = command

    def begin(self, begin: Begin) -> None:
        self.begins.append(begin)
        self.generation, self.revoked = begin.generation, 0
        error, self.error = self.error, ""
        if begin.restore:
            self.restore(begin.restore)
        elif not begin.keep:
            self.initialized, self.version, self.applied = False, 0, {}
        elif begin.decision is not None and begin.decision.round == self.version:
            # Snapshots of a generation that is over are of no use.
            self.apply(replace(begin.decision, snapshots=()))
        if begin.version is not None:
            self.version = begin.version
        holding = HeldState(self.incarnation, self.generation, self.initialized, self.version)
        engine = self.coordinator.engine
        engine.shards.report_ready(self.index, HeldReport(holding, self.applied, {}), error)

    def apply(self, decision: Decision) -> None:
        self.version += 1
        self.record(list(decision.attempts))
        for order in decision.snapshots:
            self.take(order)

    def record(self, attempts: list[Attempt]) -> None:
        """It has these batches."""
        applied = {epoch: IntervalSet(positions) for epoch, positions in self.applied.items()}
        for attempt in attempts:
            batch = attempt.batch
            positions = applied.setdefault(batch.epoch, IntervalSet())
            positions.add(batch.first, batch.first + batch.count)
        self.applied = applied

    def take(self, order: SnapshotOrder) -> None:
        """Its part of a snapshot is its version and applied-set, in words."""
        name, data = "", b""
        if order.write:
            state = {epoch: list(positions) for epoch, positions in self.applied.items()}
            name, data = f"shard-{self.index}.safetensors", repr((self.version, state)).encode()
            (self._run_dir / order.directory / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        file = ShardFile(self.index, self.version, name, len(data), digest)
        engine = self.coordinator.engine
        engine.shards.report_snapshot(
            SnapshotReport(self.incarnation, self.generation, order.name, file)
        )

    def restore(self, checkpoint: str) -> None:
        path = self._run_dir / checkpoint / f"shard-{self.index}.safetensors"
        self.version, state = eval(path.read_text(), {})
        self.applied = {epoch: IntervalSet(positions) for epoch, positions in state.items()}
        self.initialized = True

    def beat(self, **more: Any) -> tuple[bool, bool]:
        figures = ShardFigures(version=self.version, generation=self.generation)
        beat = ShardHeartbeat(
            self.index, self.incarnation, figures, **{"revoked": self.revoked, **more}
        )
        return self.coordinator.engine.shards.heartbeat(beat)

    @property
    def _run_dir(self) -> Path:
        return self.coordinator.job_run.run.run_dir


class Worker:
    """A worker without a model."""

    def __init__(self, coordinator: Coordinator, incarnation: int) -> None:
        self.coordinator = coordinator
        self.incarnation = incarnation
        self.generation, self.policy = 0, 1
        self.received = 0
        self.ahead = False
        """Whether it can compute rounds that are decided ahead."""
        self.join()

    def join(self) -> None:
        """Registers, and asks where the shards are if they are ready."""
        engine = self.coordinator.engine
        self.name = engine.sessions.register(
            WorkerRegistration(self.incarnation, "h", 1, "cpu", SHA, SOFTWARE)
        ).name
        if self.coordinator.job_run.complete:
            engine.cluster_now(self.name)
            self.generation = self.coordinator.job_run.run.generation
            self.policy = self.coordinator.job_run.run.policy

    @property
    def caller(self) -> Caller:
        return Caller(self.name, self.generation, self.policy, self.ahead)

    def lease(self, done: list[Report] | None = None) -> Work:
        work = self.coordinator.engine.lease_now(self.caller, done or [], self.received)
        if isinstance(work, Train):
            self.received = max(attempt.number for attempt in work.batches)
        return work

    def batches(self, done: list[Report] | None = None) -> list[Attempt]:
        """The train task it gets."""
        work = self.lease(done)
        assert isinstance(work, Train), work
        return list(work.batches)

    def round(self) -> Round:
        """The micro-batch it gets."""
        work = self.lease()
        assert isinstance(work, Round), work
        return work

    def commit(self, work: Round) -> Work:
        return self.coordinator.engine.commit_now(self.caller, work.round, report(work.attempt))

    def initialize(self) -> None:
        """Gives all shards their parameters, and sees training begin."""
        assert self.lease() == InitializationWork()
        for shard in self.coordinator.shards:
            shard.initialized = True
        self.coordinator.engine.report_initialized(self.caller)
        self.coordinator.settle()
        assert self.coordinator.job_run.phase == "training"

    def train(self, batches: list[Attempt]) -> list[Report]:
        """Pushes these to all shards."""
        for shard in self.coordinator.shards:
            shard.record(batches)
            shard.version += len(batches)
        return [report(attempt) for attempt in batches]


def report(attempt: Attempt) -> Report:
    """A batch that is done."""
    return Report(attempt.batch, attempt.number, loss=1.0)


def start(tmp_path: Path, shards: int = 2, **changes: Any) -> tuple[Coordinator, Worker]:
    """A cluster in training, with incarnations 10, 11, ... of shards."""
    coordinator = Coordinator(tmp_path, shards, **changes)
    for index in range(shards):
        coordinator.add(index, 10 + index)
    coordinator.settle()
    worker = Worker(coordinator, 1)
    worker.initialize()
    return coordinator, worker


__all__ = ["Coordinator", "Shard", "Worker", "report", "start"]


def _no_curves() -> Curves:
    """Curves that write nothing, and have said so already."""
    curves = Curves(Path("/dev/null/none"))
    curves.epoch({"loss": 0.0}, 0)
    curves.close()
    assert curves.warnings
    curves.warnings.clear()
    return curves
