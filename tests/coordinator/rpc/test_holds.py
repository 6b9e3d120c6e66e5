"""An attendant of a coordinator on a port."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.client.client import CoordinatorClient
from psrpc.core.errors import InvalidArgument, JobFailed
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import Served, make_run, serving
from tests.coordinator.fakes import ShardDouble, WorkerDouble, report, start_training


class Job:
    """A job of one shard and one worker that holds before its first step."""

    def __init__(self, served: Served, client: CoordinatorClient) -> None:
        self.served = served
        self.client = client
        shards, streams, workers = start_training(client)
        self.shard: ShardDouble = shards[0]
        self.stream: Iterator[pb.WatchResponse] = streams[0]
        self.worker: WorkerDouble = workers[0]

    def train(self) -> None:
        """One batch, and the checkpoint after it."""
        [attempt] = self.worker.lease().train.batches
        self.worker.heartbeat([report(attempt)])
        self.shard.take(next(self.stream).snapshot)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    run = make_run(tmp_path, train_records=16)
    with (
        serving(run, attended=True) as served,
        CoordinatorClient(served.address) as client,
    ):
        yield Job(served, client)


def test_an_attendant_sees_and_ends_holds(job: Job) -> None:
    hold = job.client.await_hold(-1)
    assert (hold.held, hold.at, hold.global_step, hold.epoch) == (True, 0, 0, 0)
    assert (hold.checkpoint, hold.phase) == ("checkpoints/step-00000000", "training")
    assert job.client.get_job_status().waiting_for.startswith("its attendant (held at batch 0; it")
    job.client.end_hold(0, 1)
    job.client.end_hold(0, 1)
    with pytest.raises(InvalidArgument, match="was ended with"):
        job.client.end_hold(0, 2)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(job.client.await_hold, 0)
        job.train()
        hold = waiting.result()
    assert (hold.held, hold.at, hold.checkpoint) == (True, 1, "checkpoints/step-00000001")


def test_the_end_of_the_job_is_told_to_an_attendant_that_waits(job: Job) -> None:
    job.served.do(job.served.job_run.warnings.add, "look here")
    first = job.client.await_hold(-1)
    assert list(first.warnings) == ["look here"]
    job.client.end_hold(first.at, 8)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(job.client.await_hold, 0)
        [attempt, *_] = job.worker.lease().train.batches
        job.worker.heartbeat([report(attempt)])
        job.served.do(job.served.job_run.fail, "no more")
        hold = waiting.result()
    assert (hold.held, hold.phase, hold.reason) == (False, "failed", "no more")
    assert (hold.at, hold.global_step, hold.checkpoint) == (1, 1, "")
    assert job.served.job_run.holding.told
    with pytest.raises(JobFailed, match="no more"):
        job.client.end_hold(0, 4)


@pytest.mark.parametrize("name", ["../step-00000000.set", ".hidden", "a/b"])
def test_a_checkpoint_to_restore_is_a_name_and_no_path(job: Job, name: str) -> None:
    assert job.client.await_hold(-1).held
    with pytest.raises(InvalidArgument, match="restore is"):
        job.client.end_hold(0, 1, restore=name)
