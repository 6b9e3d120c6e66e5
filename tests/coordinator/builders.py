"""Builders of the coordinator's tests: descriptions, runs, and coordinators that serve."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.certificates.audit import AuditLog
from coordinator.checkpoints.disk import DiskWork, ThreadedDisk
from coordinator.core.description import JobDescription
from coordinator.core.description_reader import parse_description
from coordinator.core.run import RestoredCheckpoint, Run
from coordinator.dashboard.snapshots import DashboardSnapshots
from coordinator.job.engine import Engine
from coordinator.job.job_run import JobRun
from coordinator.records.store import Store
from coordinator.rpc.server import Server
from psrpc.core.policy import SETTINGS
from psrpc.ops.clock import Clock, ManualClock
from psrpc.security.credentials import PLAINTEXT, Security

SHA = "ab" * 32


def description_json(**changes: Any) -> dict[str, Any]:
    """A small job: 10 records in batches of 4, so 3 batches an epoch. Settings of the policy are
    given as if they were the job's own."""
    given = {name: changes.pop(name) for name in SETTINGS if name in changes}
    settings = {"mode": "async", **{k: v for k, v in given.items() if v is not None}}
    return {
        "format": 1,
        "name": "tiny",
        "job_sha256": SHA,
        "policy": settings,
        "batch_size": 4,
        "epochs": 2,
        "seed": 0,
        "train_records": 10,
        "eval_records": 0,
        "data_fingerprint": "f00d",
        "variables": [
            {"name": "w", "shape": [8, 8], "dtype": "float32", "role": "trainable"},
            {"name": "b", "shape": [8], "dtype": "float32", "role": "trainable"},
        ],
        "optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.1}},
        "engine": "numpy",
        "placement": "cut",
        "needs_single_shard": None,
        "checkpoint_every": 1000,
        "full_checkpoint_every": 16,
        "keep_checkpoints": 5,
        "keep_best": None,
        "intra_op_threads": None,
        "wire_dtype": "float32",
        "total_updates": 6,
        "metrics": ["loss"],
        **changes,
    }


TABLE = {
    "name": "t",
    "width": 2,
    "vocabulary": None,
    "initializer": {"class_name": "constant", "config": {"value": 0.0}},
    "optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.1}},
}
"""An embedding table, as a description has it."""


def describe(**changes: Any) -> JobDescription:
    """The description as the coordinator reads it."""
    return parse_description(json.dumps(description_json(**changes)))


def make_run(
    run_dir: Path,
    shards: int = 1,
    restored: RestoredCheckpoint | None = None,
    generation: int = 0,
    **changes: Any,
) -> Run:
    """A run of the small job."""
    description = describe(**changes)
    return Run(
        run_id="r1",
        run_dir=run_dir,
        job_path="jobs/tiny.py",
        overrides=("epochs=2",),
        token="secret",
        description=description,
        plan=description.plan(shards),
        generation=generation,
        restored=restored,
    )


@dataclass
class Served:
    """A coordinator that answers on ``address``, run by a thread of its own."""

    address: str
    job_run: JobRun
    engine: Engine
    loop: asyncio.AbstractEventLoop

    def do(self, function: Any, *args: Any) -> Any:
        """Calls ``function`` on the coordinator's event loop and returns its result."""

        async def call() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Looks at every ring of the coordinator's bell whether something has come true."""

        async def ring() -> None:
            await self.job_run.bell.wait(self.loop.time() + 0.05)

        for _ in range(200):
            if true():
                return
            asyncio.run_coroutine_threadsafe(ring(), self.loop).result(10)
        raise AssertionError("it never came true")


@contextmanager
def serving(
    run: Run,
    clock: Clock | None = None,
    security: Security = PLAINTEXT,
    board: DashboardSnapshots | None = None,
    address: str = "127.0.0.1:0",
    audit: AuditLog | None = None,
    attended: bool = False,
    describe: Callable[[Mapping[str, str]], Awaitable[JobDescription]] | None = None,
) -> Iterator[Served]:
    """A coordinator for ``run``, on a free port unless it is told which. It ticks only when a test
    makes it, and looks at nothing: a board is the test's."""
    shown = board or DashboardSnapshots("tiny", time.time)
    started: list[Served] = []
    ready = threading.Event()
    failure: list[BaseException] = []

    async def main() -> None:
        stopped = asyncio.Event()
        with Store(run.run_dir / "ledger.sqlite") as store:
            disk = ThreadedDisk(run, failed=lambda why: job_run.fail(why))
            job_run = JobRun(run, store, clock or ManualClock(), disk, attended=attended)
            async with Server(address, security) as server:
                engine = Engine(job_run, store, describe=describe)
                await server.start(engine, shown, audit)
                loop = asyncio.get_running_loop()
                served = Served(f"127.0.0.1:{server.port}", job_run, engine, loop)
                started.append(served)
                stops.append(stopped)
                ready.set()
                await stopped.wait()
            await disk.close()
            job_run.close()

    def run_loop() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    stops: list[asyncio.Event] = []
    thread = threading.Thread(target=run_loop)
    thread.start()
    ready.wait(10)
    try:
        assert started, failure
        yield started[0]
    finally:
        if started:
            started[0].loop.call_soon_threadsafe(stops[0].set)
        thread.join(10)
        assert not failure, failure


class QueuedDisk(DiskWork):
    """The real disk, whose slow work is done when a test says so."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.queue: list[Callable[[], None]] = []

    def begin(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.queue.append(lambda: done(work()))

    def work(self) -> None:
        """Does what was asked for, and what comes of it."""
        while self.queue:
            self.queue.pop(0)()
            self.over()
