"""A whole cluster in one thread: its processes, who starts them again, and what happens to them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from coordinator.core.description import JobDescription
from coordinator.core.lifecycle import STOPPED
from coordinator.job.job_run import JobRun
from coordinator.records.epochs import EpochRow
from pserver.engine.engine import ShardEngine
from pserver.tables.tables import Tables
from psrpc.core.names import CHECKPOINTS
from tests.coordinator.builders import describe
from tests.sim.attendant import Attendant
from tests.sim.coordinator import Coordinator
from tests.sim.disk import Disk, View
from tests.sim.faults import CUT, Faults
from tests.sim.fibers import Fibers
from tests.sim.invariants import Invariants, Violation, velocity_of
from tests.sim.network import RUN_DIR, Network
from tests.sim.operator import Operator
from tests.sim.options import Options
from tests.sim.schedule import Process, Schedule, Steps
from tests.sim.shard import Shard
from tests.sim.store import StoreFile
from tests.sim.witness import ARENA, Witness, optimizer
from tests.sim.worker import Worker

RESTART_S = (0.05, 2.0)
"""How long until a process that ended is started again."""

PAUSES_S = ((0.3, 3.0), (8.5, 13.0), (8.5, 13.0), (12.0, 25.0))
"""For how long a process is stopped: shorter than a lease, about as long, and longer."""

REFUSED = re.compile(r"(PS\d+: )?snapshot \S+ could not be taken: .*(error|space)")
"""Why a job may fail here: the first checkpoint could not be written."""

TORN = re.compile(r"shard \d+ cannot restore \S+\.set")
"""Why a job may fail whose attendant's copy has rotted."""

BEST = {"metric": "loss", "lower": False}

HOPELESS = "no checkpoint"
"""How a job has ended that cannot be resumed."""

TOGETHER = "checkpoints that rotted together"
"""What is counted when a file rots that several are linked to."""

LIVENESS_S = 300.0
"""The job must have ended so long after the last fault."""


class Life(Protocol):
    """The program of a process, once started."""

    process: Process

    def live(self) -> Steps:
        """Its main thread; returns why it ended."""

    def doing(self) -> str:
        """Describes in words what it does or waits for."""

    def terminate(self) -> None:
        """SIGTERM."""


class FinalPart(NamedTuple):
    """A shard's final state; ``name`` is of its process."""

    name: str
    shard: int
    values: npt.NDArray[Any]
    velocity: npt.NDArray[Any] | None
    tables: Tables


PATIENT = {
    "metric": "loss",
    "lower": False,
    "patience": 9,
    "min_delta": 0.0,
    "restore_best": False,
}
"""It never stops a run, which trains more records with each epoch; but epochs wait for it."""


class Cluster:
    """Everything that one seed implies."""

    def __init__(
        self, seed: int, options: Options, show: Callable[[str], None] | None = None
    ) -> None:
        self.seed = seed
        self.options = options
        self.schedule = Schedule(seed, show)
        self.random: Random = self.schedule.random
        self.faults = Faults(self.random, options.rates, self.schedule.now)
        self.network = Network(self.schedule, self.faults)
        self.network.slow = dict(options.far)
        self.disk = Disk(self.random, self.faults)
        self.witness = Witness(options)
        self.invariants = Invariants(self)
        self.counts: Counter[str] = Counter()
        """What has happened besides faults: restarts, fall-backs, generations."""
        self.ended = ""
        """The phase in which the job has ended; empty while it goes on."""
        self.lives: dict[str, Life] = {}
        """The newest start of each process, by name."""
        self.store = StoreFile()
        self.hosted = options.hosted
        """Whether workers host the shards now, or slices beside them."""
        self.description = self._describe()
        self.generation = 0
        """The newest that a coordinator has formed."""
        self.policy = options.policy
        """The one that it was formed under."""
        self.until = LIVENESS_S
        """When the job must have ended, in seconds."""
        self._resuming = False
        self._starts = 0
        self._fibers: list[tuple[Process, Fibers]] = []

    # -- a run -------------------------------------------------------------------------------

    def run(self) -> None:
        """Starts everything and lets it happen. Raises Violation; any other error is a bug."""
        options, random, schedule = self.options, self.random, self.schedule
        names = self._shard_names()
        names += [f"worker-{index}" for index in range(options.workers)]
        for name in ("coordinator", *names):
            schedule.after(random.uniform(0.0, 0.3), None, self._start, name)
        operator = Operator(self)
        operator.process.spawn(operator.live())
        if options.holds:
            Attendant(self).begin()
        if options.early:
            self.begin_faults()
        schedule.run(lambda: bool(self.ended) or schedule.now() > self.until)
        if not self.ended:
            raise Violation(f"the job does not end; {self.awaited()}")
        if self.ended == HOPELESS:
            self.counts["jobs without a first checkpoint"] += 1
            return
        if self.ended != "done":
            raise Violation(f"the job ends as {self.ended}")
        self.invariants.check_end()

    def close(self) -> None:
        """Ends what still goes on."""
        for process, fibers in self._fibers:
            process.kill()
            fibers.end()
        self.store.close()

    def begin_faults(self) -> None:
        """From now on things go wrong; the first call counts."""
        options, random = self.options, self.random
        if self.faults.begun:
            return
        self.faults.begin(options.faults_s)
        self.until = self.schedule.now() + options.faults_s + LIVENESS_S
        for kind, number in options.planned.items():
            for _ in range(number):
                at = random.uniform(0.0, min(options.faults_s, 2 * options.expected_s))
                self.schedule.after(at, None, self._happen, kind)

    def job_ended(self, job_run: JobRun) -> None:
        """A coordinator says so. Who stopped the job goes on with it, and so does who has a disk
        that refuses checkpoints at times, once there is one to go on from."""
        if self.ended or self._resuming:
            return
        self.counts.update(asdict(job_run.training.tally))
        refused = self.faults.fired["EIO"] + self.faults.fired["ENOSPC"]
        stopped = job_run.reason == STOPPED
        torn = bool(self.faults.fired["rot"] and TORN.match(job_run.reason))
        refused = bool(refused and REFUSED.match(job_run.reason)) or torn
        if job_run.phase == "done" or not (stopped or refused):
            self.ended = job_run.phase if job_run.phase == "done" else job_run.reason
        elif not job_run.checkpoints.newest:
            self.ended = HOPELESS
        else:
            self.counts["jobs stopped and resumed" if stopped else "jobs refused and resumed"] += 1
            self._resuming = True
            self.schedule.after(0.0, None, self._resume)

    def _resume(self) -> None:
        """Ends everything; it is started again, with --resume auto."""
        for life in list(self.lives.values()):
            life.process.kill()
        self._resuming = False
        if self.options.moves:
            self.hosted = not self.hosted
            self.witness.place(hosted=self.hosted)
            self.description = self._describe()
            self.counts["moves to workers" if self.hosted else "moves to shards"] += 1
            if not self.hosted and not self.options.slices:
                for name in self._shard_names():
                    after_s = self.faults.between(*RESTART_S)
                    self.schedule.after(after_s, None, self._start, name)

    def _shard_names(self) -> list[str]:
        """The processes of shards that there are now."""
        alone = self.hosted and not self.options.slices
        return [] if alone else [f"shard-{index}" for index in range(self.options.shards)]

    def shards(self) -> Iterator[Shard]:
        """Every shard that is there, and every slice."""
        for life in self.lives.values():
            if life.process.alive and isinstance(life, Shard):
                yield life
            elif life.process.alive and isinstance(life, Worker):
                yield from life.slices

    def next_incarnation(self) -> int:
        """Of a process, or of a slice in one."""
        self._starts += 1
        return 1000 + self._starts

    def free_address(self, index: int) -> str:
        """Where a shard listens: a new process may get the port of one before it that is gone, or
        another."""
        ports = (6000 + index, 6100 + index, 6200 + self._starts)
        free = [p for p in ports if self.network.server_at(f"shard:{p}") is None]
        return f"shard:{self.random.choice(free)}"

    def awaited(self) -> str:
        """Describes in words what each process waits for."""
        return "; ".join(
            f"{life.process}{'' if life.process.alive else ' (dead)'}: {life.doing()}"
            for life in self.lives.values()
        )

    def view(self) -> View:
        """A read-only view of the disk."""
        return View(self.disk, Process(self.schedule, "observer", 0))

    @property
    def history(self) -> list[EpochRow]:
        """The history of each epoch, as far as it is known."""
        return self.job_run.training.epochs.history.rows

    @property
    def results(self) -> dict[str, dict[str, float]]:
        """The evaluations that the coordinator knows, by name."""
        return {name: values for name, _, values in self.job_run.training.notes.results}

    @property
    def job_run(self) -> JobRun:
        """The newest coordinator's."""
        life = self.lives["coordinator"]
        assert isinstance(life, Coordinator)
        assert life.job_run is not None
        return life.job_run

    def engines(self, generation: int) -> Iterator[tuple[str, ShardEngine]]:
        """Every shard that is there and stands at this generation."""
        for shard in self.shards():
            if shard.engine and shard.engine._held.standing.generation == generation:
                yield repr(shard), shard.engine

    def final_parts(self) -> Iterator[FinalPart]:
        """Of every shard that is there at the end."""
        for shard in self.shards():
            if shard.engine is None or shard.updates is None:
                continue
            if shard.engine._held.standing.generation == self.generation:
                yield FinalPart(
                    repr(shard),
                    shard.index,
                    shard.updates.snapshot()[ARENA],
                    velocity_of(shard.updates.slots().elements),
                    shard.engine._held.tables,
                )

    def _describe(self) -> JobDescription:
        options = self.options
        return describe(
            **options.policy.to_json(),
            then=_rule(options),
            local_steps=options.local_steps,
            batch_size=options.batch_size,
            epochs=options.epochs,
            train_records=options.records,
            eval_records=options.eval_records,
            variables=[
                {"name": v.name, "shape": list(v.shape), "dtype": v.dtype, "role": v.role}
                for v in self.witness.plan.variables
            ],
            tables=[table.to_json() for table in self.witness.plan.tables],
            optimizer=optimizer(options.momentum),
            checkpoint_every=options.checkpoint_every,
            keep_checkpoints=options.keep_checkpoints,
            keep_best=BEST if options.eval_records and options.keeps_best else None,
            total_updates=options.total_updates,
            exact=options.exact,
            dense="allreduce" if self.hosted else "shards",
            slices=self.options.slices or None if self.hosted else None,
            stop_early=PATIENT if options.paced and options.eval_records else None,
        )

    # -- processes ---------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        if name.startswith("shard") and name not in self._shard_names():
            return
        process = Process(self.schedule, name, self.next_incarnation())
        self.schedule.trace("start", process)
        if name in self.lives:
            self.counts[f"{name.partition('-')[0]} restarts"] += 1
        life: Life
        if name == "coordinator":
            life = Coordinator(self, process)
        elif name.startswith("shard"):
            life = Shard(self, process, int(name.removeprefix("shard-")), Fibers(process))
        else:
            life = Worker(self, process)
        if isinstance(life, Shard | Worker):
            self._fibers.append((process, life.fibers))
        self.lives[name] = life
        process.at_death(lambda: self._died(process))
        process.spawn(life.live(), lambda why: self.process_ended(process, why))

    def process_ended(self, process: Process, why: object) -> None:
        """A process has come to its end by itself."""
        if process.alive:
            self.schedule.trace(process, "ends:", why)
            self.invariants.check_ending(process, why)
            process.kill()

    def _died(self, process: Process) -> None:
        self.schedule.trace(process, "is gone")
        if self.lives[process.name].process is process:
            self.schedule.after(self.faults.between(*RESTART_S), None, self._start, process.name)

    # -- what happens to them ----------------------------------------------------------------

    def _happen(self, kind: str) -> None:
        everybody = [life.process for life in self.lives.values() if life.process.alive]
        if not everybody or self.faults.over:
            return
        process = self.random.choice(everybody)
        if kind == CUT:
            self._cut()
            return
        if kind == "rot":
            rotten = self.disk.rot(RUN_DIR / CHECKPOINTS)
            if not rotten:
                return
            self.counts[TOGETHER] += rotten > 1
        coordinator = self.lives.get("coordinator")
        if kind == "interrupt" and not (coordinator and coordinator.process.alive):
            return
        self.faults.fired[kind] += 1
        self.schedule.trace(kind, process)
        match kind:
            case "crash":
                process.kill()
            case "crash of some":
                for one in everybody:
                    if self.random.random() < 0.5:
                        one.kill()
            case "crash of all" | "power cut":
                for one in everybody:
                    one.kill()
                if kind == "power cut":
                    self.disk.lose({one.name for one in everybody})
            case "power cut of one":
                process.kill()
                self.disk.lose({process.name})
            case "terminate":
                process.do(self.lives[process.name].terminate)
            case "terminate all":
                for one in everybody:
                    one.do(self.lives[one.name].terminate)
            case "interrupt":
                assert isinstance(coordinator, Coordinator)
                coordinator.process.do(coordinator.interrupt)
            case "pause and crash":
                # Who goes on afterwards knows nothing of what has happened.
                process.stop()
                others = [one for one in everybody if one is not process]
                if others:
                    after = self.faults.between(0.0, 3.0)
                    self.schedule.after(after, None, self.random.choice(others).kill)
                self.schedule.after(
                    self.faults.between(*self.random.choice(PAUSES_S)), None, process.go_on
                )
            case "pause" | "pause and replacement":
                process.stop()
                pause_s = self.faults.between(*self.random.choice(PAUSES_S))
                if kind == "pause and replacement":
                    # There is one coordinator: its replacement kills it first.
                    self.schedule.after(
                        self.faults.between(0.0, pause_s), None, self._replace, process
                    )
                self.schedule.after(pause_s, None, process.go_on)

    def _cut(self) -> None:
        """One worker cannot reach one shard, or is not heard from there, or both."""
        options, random = self.options, self.random
        if self.hosted:
            hosts = sorted({shard.process.name for shard in self.shards()})
            if not hosts:
                return
            shard = random.choice(hosts)
            names = [f"worker-{index}" for index in range(options.workers)]
            if names == [shard]:
                return
            worker = random.choice([name for name in names if name != shard])
        else:
            worker = f"worker-{random.randrange(options.workers)}"
            shard = f"shard-{random.randrange(options.shards)}"
        for_s = self.faults.between(*options.cut_s)
        there, back = random.choice(((True, True), (True, False), (False, True)))
        self.schedule.trace(CUT, worker, shard, for_s)
        if there:
            self.network.cut(worker, shard, for_s)
        if back:
            self.network.cut(shard, worker, for_s)

    def _replace(self, process: Process) -> None:
        if not process.alive or self.lives[process.name].process is not process:
            return
        if process.name == "coordinator":
            process.kill()
        else:
            self._start(process.name)


def _rule(options: Options) -> dict[str, Any] | None:
    if options.then is None:
        return None
    return {"policy": options.then.to_json(), "epoch": options.then_after}
