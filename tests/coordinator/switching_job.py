"""A whole coordinator whose job changes its policy: asked, worked and finished."""

from __future__ import annotations

from typing import Any

from coordinator.core.figures import WorkerHeartbeat
from coordinator.core.work import Round, Train, Work
from psrpc.core.errors import StaleGeneration
from psrpc.core.policy import ASYNC, Policy
from tests.coordinator.whole_coordinator import Coordinator, Shard, Worker, report

JOB: dict[str, Any] = {"epochs": 2, "train_records": 16, "total_updates": 8}
SYNC = Policy(mode="sync", replicas=2)
SSP = Policy(mode="ssp", staleness=1)


def job(policy: Policy, **changes: Any) -> dict[str, Any]:
    return {**JOB, **policy.to_json(), **changes}


def work(coordinator: Coordinator, worker: Worker, count: int) -> None:
    """``worker`` does so many batches, and holds none then."""
    while count:
        count -= do(worker, worker.lease())
        coordinator.settle()


def do(worker: Worker, found: Work) -> int:
    """``worker`` does this and asks for nothing more; how many batches it was."""
    engine = worker.coordinator.engine
    if isinstance(found, Round):
        engine.job_run.commit(worker.name, found.round, report(found.attempt))
        return 1
    assert isinstance(found, Train), found
    reports = worker.train(list(found.batches))
    engine.heartbeat_worker(worker.name, WorkerHeartbeat(worker.generation, reports))
    return len(reports)


def ask(coordinator: Coordinator, *settings: str) -> tuple[int, Policy]:
    return coordinator.engine.set_policy(settings)


def held(coordinator: Coordinator) -> list[dict[int, list[tuple[int, int]]]]:
    """The batches that each shard has applied."""
    ordered = sorted(coordinator.shards, key=lambda shard: shard.index)
    return [{e: list(p) for e, p in shard.applied.items() if len(p)} for shard in ordered]


def finish(coordinator: Coordinator, worker: Worker) -> None:
    """Trains to the end; every shard has every batch then."""
    for _ in range(100):
        coordinator.settle()
        if coordinator.job_run.phase == "done":
            break
        # What it has been leased already it is given again.
        worker.received = 0
        try:
            found = worker.lease()
        except StaleGeneration:
            worker.join()
            continue
        if isinstance(found, Round | Train):
            do(worker, found)
    assert coordinator.job_run.phase == "done"
    assert held(coordinator) == [{0: [(0, 16)], 1: [(0, 16)]}] * 2


PAIRS = [(ASYNC, SYNC), (SYNC, ASYNC), (ASYNC, SSP), (SYNC, Policy(mode="sync", replicas=3))]


def written(policy: Policy) -> list[str]:
    return [f"{key}={value}" for key, value in policy.to_json().items()]


def again(coordinator: Coordinator, shards: list[Shard]) -> None:
    """The coordinator dies and comes again; the shards find it."""
    coordinator.restart()
    for shard in shards:
        shard.connect()
    coordinator.settle()
