"""Coordinators that serve doubles of shards and workers: a job in training, and ``coordinator
serve`` in this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.client import CoordinatorClient
from coordinator.core.run import Run
from coordinator.process import serve
from coordinator.process.options import ServeOptions
from coordinator.records.run_directory import RunDirectory
from psrpc.ops.clock import ManualClock
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import Served, serving
from tests.coordinator.fakes import ShardDouble, WorkerDouble, report, start_training


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
        shards, _, workers = start_training(client, 2, 3)
        served.wait_until(lambda: client.get_job_status().phase == "training")
        yield Job(served, client, clock, shards, workers)


def options(run_dir: Path, **changes: Any) -> ServeOptions:
    return ServeOptions(
        **{"job": Path("tiny.py"), "run_dir": run_dir, "bind": "127.0.0.1:0", **changes}
    )


def run_with(
    monkeypatch: pytest.MonkeyPatch,
    wanted: ServeOptions,
    others: Callable[[CoordinatorClient], object],
) -> int:
    """Serves in this thread while ``others`` plays shards and workers in another."""
    write = RunDirectory.write_address
    threads: list[threading.Thread] = []
    failures: list[BaseException] = []

    def play(address: str) -> None:
        try:
            with CoordinatorClient(address) as client:
                others(client)
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    def write_and_play(directory: RunDirectory, address: str, *, encrypted: bool) -> None:
        write(directory, address, encrypted=encrypted)
        assert (directory.path / "address").read_text() == f"{address}\n"
        threads.append(threading.Thread(target=play, args=(address,)))
        threads[0].start()

    monkeypatch.setattr(RunDirectory, "write_address", write_and_play)
    try:
        return asyncio.run(serve.serve(wanted))
    finally:
        for thread in threads:
            thread.join(10)
        assert failures == []


def train(client: CoordinatorClient, initialize: bool = True) -> list[int]:
    """A shard and a worker that take the job to its end; the positions that were trained. Without
    ``initialize`` the shard restores the checkpoint of step 2."""
    shard = ShardDouble(client, 0)
    token = shard.register().token
    assert (shard.run_dir / "token").read_text() == token
    stream = iter(shard.watch())
    if initialize:
        shard.begin(stream)
    else:
        begin = next(stream).begin
        assert begin.restore == "checkpoints/step-00000002"
        shard.obeys(begin)
        shard.holds(2, {0: [(0, 8)]})
        shard.ready()
    worker = WorkerDouble(client, 5)
    worker.register()
    worker.generation = worker.cluster().generation
    if initialize:
        worker.lease()
        worker.report_work(initialized=pb.InitializeDone())
        shard.take(next(stream).snapshot)
    done: list[pb.BatchReport] = []
    trained: list[int] = []
    for _ in range(3 if initialize else 1):
        batches = worker.lease(done).train.batches
        trained += [a.batch.first for a in batches]
        done = [report(a) for a in batches]
    worker.heartbeat(done)
    shard.take(next(stream).snapshot)
    assert not next(stream).shutdown.failed
    assert list(stream) == []
    worker.leave()
    return trained


def train_to_step_2(client: CoordinatorClient) -> tuple[ShardDouble, Any, WorkerDouble]:
    """A shard and a worker that train two batches, which are in a checkpoint then."""
    [shard], [stream], [worker] = start_training(client)
    done = [report(worker.lease().train.batches[0])]
    done.append(report(worker.lease(done).train.batches[0]))
    worker.heartbeat(done)
    shard.take(next(stream).snapshot)
    return shard, stream, worker


def describing(monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]) -> None:
    def command(*_: object) -> list[str]:
        return [sys.executable, "-c", f"print({json.dumps(document)!r})"]

    monkeypatch.setattr("coordinator.process.describing.describe_command", command)
