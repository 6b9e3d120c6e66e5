"""A job in training, and a client that asks for its status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.client.client import CoordinatorClient
from coordinator.core.run import Run
from psrpc.ops.clock import ManualClock
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import Served, serving
from tests.coordinator.fakes import ShardDouble, WorkerDouble, report


@dataclass
class Job:
    """A job in training, with two shards and three workers."""

    served: Served
    client: CoordinatorClient
    clock: ManualClock
    shards: list[ShardDouble]
    workers: list[WorkerDouble]

    @property
    def status(self) -> pb.GetJobStatusResponse:
        return self.client.get_job_status()

    def train(self, worker: WorkerDouble, compute_s: float, batches: int) -> None:
        """Does so many batches, and says that it has computed for so long by then."""
        for _ in range(batches):
            lease = worker.lease()
            [attempt] = lease.train.batches
            worker.lease([report(attempt, staleness=1)])
        self.beat(worker, compute=compute_s)

    def beat(self, worker: WorkerDouble, **times: float) -> None:
        self.client.heartbeat_worker(
            pb.HeartbeatWorkerRequest(
                session=worker.session,
                generation=worker.generation,
                times=pb.WorkerTimes(**times),
            )
        )


@contextmanager
def training(run: Run) -> Iterator[Job]:
    clock = ManualClock()
    with serving(run, clock) as served, CoordinatorClient(served.address) as client:
        shards = [ShardDouble(client, index) for index in range(2)]
        streams = []
        for shard in shards:
            shard.register()
            streams.append(iter(shard.watch()))
        for shard, stream in zip(shards, streams, strict=True):
            shard.begin(stream)
        workers = [WorkerDouble(client, 1000 + n) for n in range(3)]
        for worker in workers:
            worker.register()
        workers[0].lease()
        workers[0].report_work(initialized=pb.InitializeDone())
        for shard, stream in zip(shards, streams, strict=True):
            shard.take(next(stream).snapshot)
        served.wait_until(lambda: client.get_job_status().phase == "training")
        yield Job(served, client, clock, shards, workers)
