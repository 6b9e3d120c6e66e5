"""A whole coordinator with a job of sync rounds: done, looked at, and with a disk that refuses."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from typing import Any

from psrpc.core.commands import Begin
from psrpc.core.policy import ASYNC
from tests.coordinator.whole_coordinator import Coordinator, Worker

SYNC: dict[str, Any] = {
    "mode": "sync",
    "replicas": 2,
    "epochs": 2,
    "train_records": 16,
    "total_updates": 4,
}


def rounds(coordinator: Coordinator, worker: Worker, count: int) -> None:
    """One worker does whole rounds."""
    for _ in range(2 * count):
        worker.commit(worker.round())
    coordinator.settle()


def phase(coordinator: Coordinator) -> str:
    return coordinator.job_run.phase


def begins(coordinator: Coordinator) -> list[Begin]:
    """The last ``Begin`` of each shard; all have the policy in force."""
    ordered = sorted(coordinator.shards, key=lambda shard: shard.index)
    told = [shard.begins[-1] for shard in ordered]
    run = coordinator.job_run.run
    assert {(begin.policy, begin.settings) for begin in told} == {(run.policy, run.settings)}
    return [replace(begin, settings=ASYNC) for begin in told]


def refuse(*_: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")
