"""One seed: the members of a job, what goes wrong, and what must hold all along."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt
from psrpc.core.errors import PsError, Unreachable
from psrpc.core.placement import make_plan
from tests.coordinator.builders import describe
from tests.sim.schedule import Effect, Process, Schedule, Waiter
from tests.sim_scale.coordinator import Context, Coordinator
from tests.sim_scale.members import Shard, Worker

DEADLINE_S = 10.0
"""After so long a call whose request or answer was lost has failed."""

BATCH_SIZE = 4


@dataclass(frozen=True)
class Options:
    """A cluster, its work, and what goes wrong: how many of a kind, or with what chance."""

    workers: int = 1000
    shards: int = 100
    batches: int = 10_000
    epochs: int = 2
    batch_s: float = 2.0
    faults_s: float = 30.0
    workers_killed: int = 60
    workers_paused: int = 30
    shards_killed: int = 1
    coordinators_killed: int = 1
    lost: float = 0.001
    limit_s: float = 600.0


@dataclass
class Verdict:
    """The outcome of a seed; ``failure`` is empty if all is well."""

    seed: int
    failure: str = ""
    simulated_s: float = 0.0
    events: int = 0
    cpu_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class Violation(Exception):
    """Something happened that must not."""


class Cluster:
    """A run of a job from its beginning to its end. ``coordinator`` and ``shards`` are the present
    processes; ``committed`` and ``saved`` are its checkpoints."""

    def __init__(self, seed: int, options: Options, run_dir: Path) -> None:
        self.options = options
        self.run_dir = run_dir
        self.schedule = Schedule(seed)
        self.random = self.schedule.random
        self.counts: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self.committed: list[tuple[str, int, int]] = []
        self.saved: dict[tuple[str, int], tuple[dict[int, list[tuple[int, int]]], int]] = {}
        self.description = describe(
            epochs=options.epochs,
            batch_size=BATCH_SIZE,
            train_records=BATCH_SIZE * options.batches,
            total_updates=options.epochs * options.batches,
            checkpoint_every=options.batches // 2,
            variables=[
                {"name": "w", "shape": [64, 64], "dtype": "float32", "role": "trainable"},
            ],
        )
        self.plan = make_plan(
            self.description.variables, options.shards, self.description.placement
        )
        self._newest: dict[tuple[int, BatchId], int] = {}
        self._started = 0
        self._faulty_until: float | None = None
        self.coordinator = self._start_coordinator()
        self.shards: list[Shard] = [self._start_shard(index) for index in range(options.shards)]
        self.workers: list[Worker] = [self._start_worker() for _ in range(options.workers)]

    # -- processes

    def _process(self, name: str) -> Process:
        self._started += 1
        return Process(self.schedule, name, self._started)

    def _start_coordinator(self) -> Coordinator:
        process = self._process("coordinator")
        self.coordinator = Coordinator(self, process)
        process.spawn(self.coordinator.live())
        return self.coordinator

    def _start_shard(self, index: int) -> Shard:
        process = self._process(f"shard-{index}")
        shard = Shard(self, process, index)
        process.spawn(shard.live())
        return shard

    def _start_worker(self) -> Worker:
        process = self._process("worker")
        worker = Worker(self, process)
        process.spawn(worker.live())
        return worker

    # -- time and network

    def latency(self) -> float:
        """Seconds that a message takes."""
        return self.random.uniform(0.0005, 0.004)

    def batch_s(self) -> float:
        """Seconds that a batch takes: some workers are slower than others."""
        return self.options.batch_s * self.random.uniform(0.5, 1.5)

    @property
    def _faulty(self) -> bool:
        return self._faulty_until is not None and self.schedule.now() < self._faulty_until

    def _strikes(self, kind: str) -> bool:
        if self._faulty and self.random.random() < self.options.lost:
            self.fired[kind] += 1
            return True
        return False

    def call(self, process: Process, method: str, request: Any) -> Effect:
        """The effect of a call of the coordinator. Raises its PsError, or Unreachable."""

        def effect(task: Waiter) -> None:
            schedule, coordinator = self.schedule, self.coordinator
            said = method, request, Context(process.incarnation)
            lost = Unreachable(f"{method}: no answer")

            def end(value: Any) -> None:
                schedule.after(self.latency(), task.process, task.resume, value)

            def give_up() -> None:
                schedule.after(DEADLINE_S, task.process, task.resume, lost)

            def respond(value: Any) -> None:
                if open_calls.discard_if_open():
                    give_up() if self._strikes("reply lost") else end(value)

            def gone() -> None:
                if open_calls.discard_if_open():
                    end(lost)

            open_calls = _Once()

            def arrive() -> None:
                server = coordinator.process
                if not server.alive:
                    end(lost)
                    return
                server.at_death(gone)
                server.do(coordinator.handle, *said, respond)

            if self._strikes("request lost"):
                give_up()
            else:
                schedule.after(self.latency(), None, arrive)
                if self._strikes("duplicate"):
                    again = self.random.uniform(0.0, 5.0)
                    ignore: Callable[[Any], None] = lambda _answer: None  # noqa: E731
                    schedule.after(again, coordinator.process, coordinator.handle, *said, ignore)

        return effect

    # -- what must hold

    def leased(self, generation: int, worker: str, attempts: Sequence[Attempt]) -> None:
        """Notes a lease that the coordinator answers with."""
        self.counts["leases"] += 1
        for attempt in attempts:
            key = generation, attempt.batch
            newest = self._newest.get(key, 0)
            if attempt.number < newest:
                raise Violation(f"{attempt} is leased to {worker} after attempt {newest}")
            self._newest[key] = attempt.number

    def applied(self, generation: int, batch: BatchId, attempt: int) -> None:
        """Checks a batch that a shard applies: no other worker may have it by now."""
        newest = self._newest.get((generation, batch), 0)
        if attempt != newest:
            raise Violation(f"a shard applies attempt {attempt} of {batch} after {newest}")

    def check_end(self) -> None:
        """Checks that every shard has every record of every epoch."""
        records = self.description.train_records
        for shard in self.shards:
            for epoch in range(self.options.epochs):
                have = shard.applied.get(epoch)
                if have is None or list(have) != [(0, records)]:
                    raise Violation(f"shard {shard.index} lacks batches of epoch {epoch + 1}")

    # -- the run

    def run(self) -> None:
        """Runs to the end. Raises Violation."""
        self.schedule.after(0.0, None, self._begin_faults)
        self.schedule.run(self._over)
        job_run = self.coordinator.job_run
        if job_run is None or job_run.phase != "done":
            waits = job_run.waiting_for() if job_run else "its start"
            raise Violation(f"not done after {self.options.limit_s:.0f} s: waits for {waits}")
        self.check_end()
        self.counts["batches"] += job_run.training.span.batches

    def _over(self) -> bool:
        job_run = self.coordinator.job_run
        ended = job_run is not None and job_run.phase in ("done", "failed")
        return ended or self.schedule.now() > self.options.limit_s

    def _begin_faults(self) -> None:
        job_run = self.coordinator.job_run
        if job_run is None or job_run.phase != "training":
            self.schedule.after(0.1, None, self._begin_faults)
            return
        options, now = self.options, self.schedule.now()
        self._faulty_until = now + options.faults_s
        plan = [
            (options.workers_killed, self._kill_worker),
            (options.workers_paused, self._pause_worker),
            (options.shards_killed, self._kill_shard),
            (options.coordinators_killed, self._kill_coordinator),
        ]
        for count, fault in plan:
            for _ in range(count):
                self.schedule.after(self.random.uniform(0.0, options.faults_s), None, fault)

    def _kill_worker(self) -> None:
        at = self.random.randrange(len(self.workers))
        self.fired["worker killed"] += 1
        self.workers[at].process.kill()

        def again() -> None:
            self.workers[at] = self._start_worker()

        self.schedule.after(self.random.uniform(0.5, 20.0), None, again)

    def _pause_worker(self) -> None:
        process = self.random.choice(self.workers).process
        if process.alive and not process.paused:
            self.fired["worker paused"] += 1
            process.stop()
            self.schedule.after(self.random.uniform(1.0, 25.0), None, process.go_on)

    def _kill_shard(self) -> None:
        index = self.random.randrange(len(self.shards))
        self.fired["shard killed"] += 1
        self.shards[index].process.kill()
        self.coordinator.streams_of(index)

        def again() -> None:
            self.shards[index] = self._start_shard(index)

        self.schedule.after(self.random.uniform(0.5, 5.0), None, again)

    def _kill_coordinator(self) -> None:
        self.fired["coordinator killed"] += 1
        self.coordinator.process.kill()

        def again() -> None:
            self._start_coordinator()

        self.schedule.after(self.random.uniform(0.5, 3.0), None, again)


class _Once:
    """Whether a call still waits for its answer."""

    def __init__(self) -> None:
        self._open = True

    def discard_if_open(self) -> bool:
        was, self._open = self._open, False
        return was


def _memory() -> str | None:
    """A folder whose files are not synced to a disk, for the ledger; None if there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def run_crowd(seed: int, options: Options) -> Verdict:
    """Runs one seed."""
    began = time.process_time()
    verdict = Verdict(seed)
    with tempfile.TemporaryDirectory(prefix="sim-scale-", dir=_memory()) as folder:
        cluster = Cluster(seed, options, Path(folder))
        try:
            cluster.run()
        except (Violation, PsError, AssertionError) as error:
            verdict.failure = repr(error)
        finally:
            cluster.coordinator.process.kill()
    verdict.simulated_s, verdict.events = cluster.schedule.now(), cluster.schedule.events
    verdict.fired, verdict.counts = cluster.fired, cluster.counts
    verdict.cpu_s = time.process_time() - began
    return verdict
