"""The load generators speak the real protocol, and their tables say what was missed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.scale.alone import Memory, Restart, rates_table, verdicts
from benchmarks.scale.calls import CallBook, MemberCalls
from benchmarks.scale.crowd import Seen
from benchmarks.scale.shards import SimulatedShards
from benchmarks.scale.sleepers import COORDINATOR, SHARD, WORKER, Sleepers, sleepers_table
from benchmarks.scale.workers import SimulatedWorker
from psrpc.v1 import coordinator_pb2 as pb
from tests.coordinator.builders import make_run, serving


@pytest.mark.slow
def test_simulated_members_bring_a_job_to_its_end(tmp_path: Path) -> None:
    book = CallBook()

    async def train(address: str) -> list[SimulatedWorker]:
        calls = MemberCalls(address, book)
        job = await calls.persist("GetJob", pb.GetJobRequest())
        await calls.close()
        shards = SimulatedShards(address, 2, book)
        shards.start()
        workers = [SimulatedWorker(address, shards, job, book) for _ in range(3)]
        for worker in workers:
            worker.batch_s = 0.0
        await asyncio.gather(*(worker.run() for worker in workers))
        await shards.stop()
        return workers

    with serving(make_run(tmp_path, shards=2)) as served:
        workers = asyncio.run(train(served.address))
        assert served.job_run.phase == "done"
        assert served.job_run.training.span.batches == 6
    assert sum(worker.batches for worker in workers) == 6
    assert len(book.took_s["LeaseWork"]) == book.calls["LeaseWork"]


def seen(batches_per_s: float, p99_s: float) -> Seen:
    took_s = {"LeaseWork": [0.001] * 98 + [p99_s] * 2, "HeartbeatWorker": [0.002]}
    return Seen(
        seconds=10.0,
        batches_per_s=batches_per_s,
        coordinator_cpu=0.5,
        load_cpu=0.4,
        resident_mb=200.0,
        calls=Counter(LeaseWork=100),
        failed=Counter(),
        took_s=took_s,
    )


def test_a_missed_target_is_said_to_be_missed() -> None:
    found = [(0.5, seen(1990.0, 0.06)), (0.1, seen(5100.0, 0.4))]
    said = verdicts(found, [Memory(100_000, 100.0, 9.0), Memory(10**6, 109.0, 9.0)], None)
    rows = [line for line in said.splitlines() if "≥" in line or "≤" in line]
    assert ["missed" in row for row in rows] == [False, True, False]
    assert "1990 batches/s" in rows[1]
    assert "**missed**" in verdicts([], [], Restart(10**6, 1.0, 2.5))
    assert "| 2000 | 1990 | 10 |" in rates_table(1000, found)


def test_a_step_that_is_too_short_is_said_to_be() -> None:
    us = {WORKER: 500.0, SHARD: 300.0, COORDINATOR: 900.0}
    rows = [
        Sleepers("async", step_s, 64, 64 * ideal / step_s, 256 * ideal / step_s, ideal, us, 1.2)
        for step_s, ideal in ((0.5, 0.97), (0.1, 0.8))
    ]
    text = sleepers_table(rows)
    assert "97.0 % (met)" in text
    assert "80.0 % (**missed**)" in text
