"""Shards and workers without parameters, which speak the RPCs of the real ones, and what serves
doubles of a coordinator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.client.client import CoordinatorClient
from coordinator.client.command_stream import CommandStream
from psrpc import SOFTWARE
from psrpc.net.channel import bind, make_server
from psrpc.security.credentials import PLAINTEXT, Security
from psrpc.security.signatures import SECRET_BYTES, receipt_of
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.v1.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from psrpc.wire.commands import from_batch
from psrpc.wire.interceptor import ErrorInterceptor
from tests.coordinator.builders import SHA


@contextmanager
def listening(
    servicer: CoordinatorServicer, address: str = "127.0.0.1:0", security: Security = PLAINTEXT
) -> Iterator[str]:
    """Serves a coordinator's RPCs, and gives the address."""
    server = make_server(16, [ErrorInterceptor()], security)
    add_CoordinatorServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = bind(server, address, security)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


GRANT_KEYS: dict[str, bytes] = {}
"""What the shards of a coordinator vouch with, by its address."""

MOST_SHARDS = 4


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

    def obeys(self, begin: pb.Begin) -> None:
        """It stands in this generation from now on, with its keys."""
        self.told.append(begin)
        GRANT_KEYS[self.client.address] = begin.grant_key
        self.generation = begin.generation

    def begin(self, stream: Iterator[pb.WatchResponse], error: str = "") -> pb.Begin:
        """Carries out the order to begin, which comes next."""
        begin = next(stream).begin
        self.obeys(begin)
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
        self.session = b""
        self.secret = incarnation.to_bytes(SECRET_BYTES)
        self.received = 0

    def register(self, sha: str = SHA, software: str = SOFTWARE, settings: str = "") -> str:
        answer = self.client.register_worker(
            pb.RegisterWorkerRequest(
                incarnation=self.incarnation,
                host="here",
                pid=self.incarnation,
                job_sha256=sha,
                software=software,
                device="cpu",
                settings_sha256=settings,
                secret=self.secret,
            )
        )
        self.name, self.session = answer.worker, answer.session
        return self.name

    def cluster(self) -> pb.GetClusterResponse:
        return self.client.get_cluster(pb.GetClusterRequest(session=self.session))

    def lease(self, done: list[pb.BatchReport] | None = None) -> pb.Lease:
        lease = self.client.lease_work(
            pb.LeaseWorkRequest(
                session=self.session,
                generation=self.generation,
                policy=self.policy,
                done=self.vouched(done),
                received=self.received,
            )
        ).lease
        self.received = max([self.received, *(a.attempt for a in lease.train.batches)])
        return lease

    def commit(self, work: pb.RoundWork, **fate: Any) -> pb.Lease:
        return self.client.commit_batch(
            pb.CommitBatchRequest(
                session=self.session,
                generation=self.generation,
                policy=self.policy,
                round=work.round,
                report=self.vouched([report(work.attempt, **fate)])[0],
            )
        ).lease

    def report_work(self, **work: Any) -> None:
        self.client.report_work(
            pb.ReportWorkRequest(
                session=self.session,
                generation=self.generation,
                **work,
            )
        )

    def heartbeat(self, done: list[pb.BatchReport] | None = None) -> pb.HeartbeatWorkerResponse:
        return self.client.heartbeat_worker(
            pb.HeartbeatWorkerRequest(
                session=self.session,
                generation=self.generation,
                done=self.vouched(done),
            )
        )

    def vouched(self, done: list[pb.BatchReport] | None) -> list[pb.BatchReport]:
        """``done`` with the receipts of shards that this worker has pushed to."""
        return [self._vouched(one) for one in done or ()]

    def _vouched(self, done: pb.BatchReport) -> pb.BatchReport:
        found = pb.BatchReport()
        found.CopyFrom(done)
        key, batch = GRANT_KEYS[self.client.address], from_batch(done.batch)
        found.receipts[:] = (
            receipt_of(key, self.name, self.generation, batch, done.attempt, shard, done.skipped)
            for shard in range(MOST_SHARDS)
        )
        return found

    def wait_for_end(self) -> pb.Shutdown:
        """Gives signs of life until it hears that the job is over."""
        for _ in range(1000):
            answer = self.heartbeat()
            if answer.HasField("shutdown"):
                return answer.shutdown
        raise AssertionError("the job does not end")

    def leave(self, reason: str = "", fatal: bool = False) -> None:
        self.client.leave_worker(
            pb.LeaveWorkerRequest(session=self.session, reason=reason, fatal=fatal)
        )


def report(attempt: types.Attempt, loss: float = 1.0, **fate: Any) -> pb.BatchReport:
    """A batch that is done."""
    return pb.BatchReport(batch=attempt.batch, attempt=attempt.attempt, loss=loss, **fate)


def start_training(
    client: CoordinatorClient, shards: int = 1, workers: int = 1
) -> tuple[list[ShardDouble], list[Any], list[WorkerDouble]]:
    """Takes a cluster of doubles through initialization and the step-0 checkpoint."""
    shard_doubles = [ShardDouble(client, k) for k in range(shards)]
    streams = []
    for shard in shard_doubles:
        shard.register()
        streams.append(iter(shard.watch()))
    for shard, stream in zip(shard_doubles, streams, strict=True):
        assert shard.begin(stream).fresh
    worker_doubles = [WorkerDouble(client, 1000 + n) for n in range(workers)]
    for worker in worker_doubles:
        worker.register()
    first = worker_doubles[0]
    assert first.lease().WhichOneof("work") == "initialize"
    first.report_work(initialized=pb.InitializeDone())
    for shard, stream in zip(shard_doubles, streams, strict=True):
        order = next(stream).snapshot
        assert (order.name, order.write, order.keep) == ("step-00000000", True, False)
        shard.take(order)
    return shard_doubles, streams, worker_doubles
