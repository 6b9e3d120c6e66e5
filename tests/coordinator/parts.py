"""What the coordinator's tests are made of: descriptions, runs and members that speak RPC."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.client import CommandStream, CoordinatorClient
from coordinator.course import Course
from coordinator.description import JobDescription, parse_description
from coordinator.disk import DiskWork, ThreadedDisk
from coordinator.engine import Engine
from coordinator.run import Restored, Run
from coordinator.server import Server
from coordinator.store import Store
from psrpc.clock import Clock, ManualClock
from psrpc.plan import make_plan
from psrpc.policy import SETTINGS
from psrpc.security import PLAINTEXT, Security
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.version import SOFTWARE

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
        "keep_checkpoints": 5,
        "keep_best": None,
        "intra_op_threads": None,
        "wire_dtype": "float32",
        "total_updates": 6,
        "metrics": ["loss"],
        **changes,
    }


def describe(**changes: Any) -> JobDescription:
    """The description as the coordinator reads it."""
    return parse_description(json.dumps(description_json(**changes)))


def make_run(
    run_dir: Path,
    shards: int = 1,
    restored: Restored | None = None,
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
        plan=make_plan(description.variables, shards, description.placement),
        generation=generation,
        restored=restored,
    )


@dataclass
class Served:
    """A coordinator that answers on ``address``, run by a thread of its own."""

    address: str
    course: Course
    loop: asyncio.AbstractEventLoop

    def do(self, function: Any, *args: Any) -> Any:
        """Calls ``function`` on the coordinator's event loop and returns its result."""

        async def call() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Looks at every ring of the coordinator's bell whether something has come true."""

        async def ring() -> None:
            await self.course.bell.wait(self.loop.time() + 0.05)

        for _ in range(200):
            if true():
                return
            asyncio.run_coroutine_threadsafe(ring(), self.loop).result(10)
        raise AssertionError("it never came true")


@contextmanager
def serving(
    run: Run, clock: Clock | None = None, security: Security = PLAINTEXT
) -> Iterator[Served]:
    """A coordinator for ``run`` on a free port. It ticks only when a test makes it."""
    started: list[Served] = []
    ready = threading.Event()
    failure: list[BaseException] = []

    async def main() -> None:
        stopped = asyncio.Event()
        with Store(run.run_dir / "ledger.sqlite") as store:
            disk = ThreadedDisk(run, failed=lambda why: course.fail(why))
            course = Course(run, store, clock or ManualClock(), disk)
            async with Server("127.0.0.1:0", security) as server:
                await server.start(Engine(course, store))
                served = Served(f"127.0.0.1:{server.port}", course, asyncio.get_running_loop())
                started.append(served)
                stops.append(stopped)
                ready.set()
                await stopped.wait()
            await disk.close()
            course.close()

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

    def start(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.queue.append(lambda: done(work()))

    def work(self) -> None:
        """Does what was asked for, and what comes of it."""
        while self.queue:
            self.queue.pop(0)()


class ShardDouble:
    """A shard without parameters: registers, watches, begins as it is told, and reports snapshots
    as files of 3 bytes."""

    def __init__(self, client: CoordinatorClient, index: int, incarnation: int = 0) -> None:
        self.client = client
        self.index = index
        self.incarnation = incarnation or 100 + index
        self.generation = 0
        self.run_dir = Path()
        self.version = 0
        self.initialized = False
        self.applied: dict[int, Any] = {}
        self.revoked = 0
        self.told: list[pb.Begin] = []

    def register(self) -> pb.RegisterShardResponse:
        response = self.client.register_shard(
            pb.RegisterShardRequest(
                shard=self.index,
                incarnation=self.incarnation,
                address=f"127.0.0.1:{6000 + self.index}",
                host="here",
                pid=1,
                software=SOFTWARE,
            )
        )
        self.run_dir = Path(response.run_dir)
        return response

    def holds(self, version: int, applied: dict[int, Any] | None = None) -> None:
        """It holds parameters from now on, as if it had restored or trained them."""
        self.initialized, self.version, self.applied = True, version, applied or {}

    def begin(self, stream: Iterator[pb.WatchResponse], error: str = "") -> pb.Begin:
        """Carries out the order to begin, which comes next."""
        begin = next(stream).begin
        self.told.append(begin)
        self.generation = begin.generation
        if begin.fresh:
            self.initialized, self.version, self.applied = False, 0, {}
        if begin.HasField("version"):
            self.version = begin.version
        self.revoked = 0
        self.ready(error)
        return begin

    def ready(self, error: str = "") -> None:
        self.client.report_shard_ready(
            pb.ReportShardReadyRequest(
                shard=self.index,
                incarnation=self.incarnation,
                generation=self.generation,
                version=self.version,
                initialized=self.initialized,
                applied=[
                    types.AppliedEpoch(
                        epoch=epoch, applied=[types.Interval(start=a, stop=b) for a, b in parts]
                    )
                    for epoch, parts in self.applied.items()
                ],
                error=error,
            )
        )

    def watch(self) -> CommandStream:
        return self.client.watch(
            pb.WatchRequest(
                shard=self.index,
                incarnation=self.incarnation,
                generation=self.generation,
                initialized=self.initialized,
                version=self.version,
            )
        )

    def heartbeat(self, **more: Any) -> pb.HeartbeatShardResponse:
        return self.client.heartbeat_shard(
            pb.HeartbeatShardRequest(
                shard=self.index,
                incarnation=self.incarnation,
                generation=self.generation,
                version=self.version,
                revoked=self.revoked,
                **more,
            )
        )

    def refuse(self, stream: Iterator[pb.WatchResponse]) -> pb.Revocation:
        """Obeys the revocation that comes next, and says so."""
        revocation = next(stream).revocation
        assert revocation.number
        self.revoked = revocation.number
        self.heartbeat()
        return revocation

    def take(self, order: types.SnapshotOrder, error: str = "") -> None:
        """Does as a snapshot order says."""
        name, data = "", b""
        if order.write and not error:
            name, data = f"shard-{self.index}.safetensors", b"abc"
            (self.run_dir / order.directory / name).write_bytes(data)
        self.client.report_snapshot(
            pb.ReportSnapshotRequest(
                shard=self.index,
                incarnation=self.incarnation,
                generation=self.generation,
                name=order.name,
                version=self.version,
                file=name,
                nbytes=len(data),
                sha256=hashlib.sha256(data).hexdigest() if data else "",
                error=error,
            )
        )


class WorkerDouble:
    """A worker without a model."""

    def __init__(self, client: CoordinatorClient, incarnation: int, generation: int = 1) -> None:
        self.client = client
        self.incarnation = incarnation
        self.generation = generation
        self.policy = 1
        self.name = ""
        self.received = 0

    def register(self, sha: str = SHA, software: str = SOFTWARE, settings: str = "") -> str:
        self.name = self.client.register_worker(
            pb.RegisterWorkerRequest(
                incarnation=self.incarnation,
                host="here",
                pid=self.incarnation,
                job_sha256=sha,
                software=software,
                device="cpu",
                settings_sha256=settings,
            )
        ).worker
        return self.name

    def cluster(self) -> pb.GetClusterResponse:
        return self.client.get_cluster(
            pb.GetClusterRequest(worker=self.name, incarnation=self.incarnation)
        )

    def lease(self, done: list[pb.BatchReport] | None = None) -> pb.Lease:
        lease = self.client.lease_work(
            pb.LeaseWorkRequest(
                worker=self.name,
                incarnation=self.incarnation,
                generation=self.generation,
                policy=self.policy,
                done=done or [],
                received=self.received,
            )
        ).lease
        self.received = max([self.received, *(a.attempt for a in lease.train.batches)])
        return lease

    def commit(self, work: pb.RoundWork, **fate: Any) -> pb.Lease:
        return self.client.commit_batch(
            pb.CommitBatchRequest(
                worker=self.name,
                incarnation=self.incarnation,
                generation=self.generation,
                policy=self.policy,
                round=work.round,
                report=report(work.attempt, **fate),
            )
        ).lease

    def report_work(self, **work: Any) -> None:
        self.client.report_work(
            pb.ReportWorkRequest(
                worker=self.name,
                incarnation=self.incarnation,
                generation=self.generation,
                **work,
            )
        )

    def heartbeat(self, done: list[pb.BatchReport] | None = None) -> pb.HeartbeatWorkerResponse:
        return self.client.heartbeat_worker(
            pb.HeartbeatWorkerRequest(
                worker=self.name,
                incarnation=self.incarnation,
                generation=self.generation,
                done=done or [],
            )
        )

    def wait_for_end(self) -> pb.Shutdown:
        """Gives signs of life until it hears that the job is over."""
        for _ in range(1000):
            answer = self.heartbeat()
            if answer.HasField("shutdown"):
                return answer.shutdown
        raise AssertionError("the job does not end")

    def leave(self, reason: str = "", fatal: bool = False) -> None:
        self.client.leave_worker(
            pb.LeaveWorkerRequest(
                worker=self.name, incarnation=self.incarnation, reason=reason, fatal=fatal
            )
        )


def report(attempt: types.Attempt, loss: float = 1.0, **fate: Any) -> pb.BatchReport:
    """A batch that is done."""
    return pb.BatchReport(batch=attempt.batch, attempt=attempt.attempt, loss=loss, **fate)


__all__ = [
    "SHA",
    "QueuedDisk",
    "Served",
    "ShardDouble",
    "WorkerDouble",
    "describe",
    "description_json",
    "make_run",
    "report",
    "serving",
]
