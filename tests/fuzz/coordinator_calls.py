"""The RPCs of a coordinator, as any member may call them: an input is several calls, one after
another, on a job that trains."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from coordinator.job.authority import Authority
from coordinator.job.engine import Engine
from coordinator.job.job_run import JobRun
from coordinator.records.store import Store
from coordinator.rpc.servicer import Servicer
from psrpc import SOFTWARE
from psrpc.core.errors import PsError
from psrpc.ops.clock import ManualClock
from psrpc.security.signatures import receipt_of
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_batch
from tests.coordinator.builders import SHA, QueuedDisk, make_run
from tests.fuzz.calls import Caller, joined, split

METHODS = tuple(pb.DESCRIPTOR.services_by_name["Coordinator"].methods)
"""In the order of the proto; an input names one by its place."""

SHARDS = 2
STEPS = 8
"""Turns of the loop that a call gets: what is parked longer waits for news that never come."""


class Job:
    """A coordinator without a network, whose shards hold parameters, and one worker."""

    def __init__(self, run_dir: Path, loop: asyncio.AbstractEventLoop) -> None:
        draws = itertools.count(1)
        self._loop = loop
        self.store = Store(run_dir / "ledger.sqlite")
        self.store.open()
        run = make_run(run_dir, shards=SHARDS)
        self.authority = Authority(lambda nbytes: next(draws).to_bytes(nbytes, "big"))
        self.disk = QueuedDisk(run)
        self.job_run = JobRun(run, self.store, ManualClock(), self.disk)
        self.servicer = Servicer(Engine(self.job_run, self.store, self.authority))
        self._streams: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Shards and a worker join, as real ones do."""
        for shard in range(SHARDS):
            self.call("RegisterShard", register_shard(shard))
            watch = pb.WatchRequest(
                shard=shard, incarnation=100 + shard, generation=0, initialized=True
            )
            self.call("Watch", watch)
        for shard in range(SHARDS):
            ready = pb.ReportShardReadyRequest(
                shard=shard, incarnation=100 + shard, generation=1, initialized=True
            )
            self.call("ReportShardReady", ready)
        (first,) = self.job_run.run.run_dir.glob(f"checkpoints/*{FIRST}*")
        for shard in range(SHARDS):
            (first / f"shard-{shard}").write_bytes(b"abc")
            self.call("ReportSnapshot", snapshot(shard))
        self.call("RegisterWorker", REGISTER)
        assert self.job_run.phase == "training"

    def call(self, method: str, request: Message) -> None:
        """One call, which may not be over."""

        async def make() -> None:
            found = getattr(self.servicer, method)(request, Caller())
            if isinstance(found, Message):
                return
            streams = hasattr(found, "__anext__")
            task = asyncio.ensure_future(_listen(found) if streams else found)
            for _ in range(STEPS):
                await asyncio.sleep(0)
                self.disk.work()
            if task.done():
                task.result()
            elif streams:
                self._streams.append(task)
            else:
                await _cancelled([task])

        self._loop.run_until_complete(make())

    def state(self) -> bytes:
        """All that an operator sees."""
        return self.servicer.status().SerializeToString(deterministic=True)

    def close(self) -> None:
        """Ends its streams."""
        if self._streams:
            self._loop.run_until_complete(_cancelled(self._streams))
        self.job_run.close()
        self.store.close()


async def _listen(commands: AsyncIterator[object]) -> None:
    """To a command stream, for as long as it lasts."""
    async for _ in commands:
        pass


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def register_shard(shard: int, incarnation: int = 0) -> pb.RegisterShardRequest:
    """As a shard's process does."""
    return pb.RegisterShardRequest(
        shard=shard,
        incarnation=incarnation or 100 + shard,
        address=f"127.0.0.1:{6000 + shard}",
        host="here",
        pid=1,
        software=SOFTWARE,
    )


def snapshot(shard: int) -> pb.ReportSnapshotRequest:
    """That a shard has written the first checkpoint."""
    return pb.ReportSnapshotRequest(
        shard=shard,
        incarnation=100 + shard,
        generation=1,
        name=FIRST,
        file=f"shard-{shard}",
        nbytes=3,
        sha256=hashlib.sha256(b"abc").hexdigest(),
    )


FIRST = "step-00000000"

REGISTER = pb.RegisterWorkerRequest(
    incarnation=7, host="here", pid=2, job_sha256=SHA, software=SOFTWARE, secret=bytes(32)
)


@contextmanager
def training() -> Iterator[Job]:
    """A job of its own, in memory where the system has a place for that."""
    memory = Path("/dev/shm")
    where = tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None)
    try:
        with closing(Job(Path(where), _loop())) as job:
            job.begin()
            yield job
    finally:
        shutil.rmtree(where, ignore_errors=True)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def coordinator_calls(data: bytes) -> None:
    """Any messages in any order are answered or refused; what is refused for its form has changed
    nothing, and the coordinator still answers."""
    with training() as job:
        for kind, message in split(data):
            method = METHODS[kind % len(METHODS)]
            before = job.state()
            try:
                request = _class_of(method.input_type.name).FromString(message)
            except DecodeError:
                continue
            refused = _refusal(job, method.name, request)
            # Who reports what it did not push is dismissed.
            if refused is not None and refused.code != "PS308":
                assert job.state() == before, (method.name, refused)
        job.state()


def _refusal(job: Job, method: str, request: Message) -> PsError | None:
    try:
        job.call(method, request)
    except PsError as error:
        return error
    return None


def _class_of(name: str) -> Any:
    return getattr(pb, name)


@cache
def coordinator_seeds() -> tuple[bytes, ...]:
    """Good calls of a worker, of shards and of an operator."""
    with training() as job:
        worker = job.job_run.members.workers["worker-0"]
        session = worker.session
        batch = types.BatchId(epoch=0, first=0, count=4)
        keys = job.authority.keys
        receipts = [
            receipt_of(keys.grant, worker.name, 1, from_batch(batch), 1, shard, False)
            for shard in range(SHARDS)
        ]
    report = pb.BatchReport(batch=batch, attempt=1, loss=0.5, receipts=receipts)
    fence: dict[str, Any] = {"session": session, "generation": 1}
    lease = pb.LeaseWorkRequest(**fence, policy=1)
    rounds: list[list[tuple[str, Message]]] = [
        [("LeaseWork", lease), ("HeartbeatWorker", pb.HeartbeatWorkerRequest(**fence, policy=1))],
        [
            ("LeaseWork", lease),
            ("LeaseWork", pb.LeaseWorkRequest(**fence, policy=1, done=[report])),
        ],
        [("CommitBatch", pb.CommitBatchRequest(**fence, policy=1, round=0, report=report))],
        [("ReportWork", pb.ReportWorkRequest(**fence, initialized=pb.InitializeDone()))],
        [("ReportWork", pb.ReportWorkRequest(**fence, merged=pb.MergeDone(results={"loss": 1.0})))],
        [("LeaveWorker", pb.LeaveWorkerRequest(session=session, reason="enough"))],
        [("GetCluster", pb.GetClusterRequest(session=session)), ("RegisterWorker", REGISTER)],
        [("SetPolicy", pb.SetPolicyRequest(settings=["mode=ssp", "staleness=4"]))],
        [
            ("AwaitHold", pb.AwaitHoldRequest(after=-1)),
            ("EndHold", pb.EndHoldRequest(at=0, until=2, rate=0.5, restore="step-00000000.set")),
        ],
        [("RevokeWorker", pb.RevokeWorkerRequest(worker="worker-0", reason="slow", bar=True))],
        [("HeartbeatShard", pb.HeartbeatShardRequest(shard=0, incarnation=100, generation=1))],
        [("RegisterShard", register_shard(1, 555))],
        [("ReportSnapshot", snapshot(0))],
        [("GetJobStatus", pb.GetJobStatusRequest()), ("GetDashboard", pb.GetDashboardRequest())],
    ]
    places = {method.name: place for place, method in enumerate(METHODS)}
    return tuple(
        joined((places[name], message.SerializeToString()) for name, message in calls)
        for calls in rounds
    )
