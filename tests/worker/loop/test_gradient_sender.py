"""Gradients of rounds that were decided ahead, at two real shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pserver.client.client import ShardClient
from pserver.client.requests import GradientPush
from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, RoundsAhead
from psrpc.core.encoding import plain
from psrpc.v1 import coordinator_pb2 as pb
from tests.pserver.shards import fence_of, grant_of
from tests.worker.loop.fixtures import ARENA, WITNESSES, at_work, attempt, plan_of
from tests.worker.scripted_coordinator import ScriptedCoordinator
from tests.worker.shards import Shards

ROUNDS = range(3)


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "calls"])
def test_all_shards_apply_rounds_that_were_decided_ahead_without_a_commit(shm: bool) -> None:
    """The last one as well, after which the worker has nothing to pull."""

    def leases(_coordinator: ScriptedCoordinator, shards: Shards) -> list[Any]:
        decided = [Decision(1, n, (Attempt(BatchId(0, n, 1), n + 1),)) for n in ROUNDS]
        for engine in shards.engines:
            engine.commands.plan(RoundsAhead(tuple(decided)))
        attempts = [pb.AttemptAhead(round=n, attempt=attempt(n)) for n in ROUNDS]
        return [pb.Lease(rounds=pb.RoundsTask(attempts=attempts))]

    with at_work(leases, "sync", shm=shm) as running:
        running.check(*ROUNDS)
        engines = running.shards.engines
        assert [engine.report().version for engine in engines] == [len(ROUNDS)] * 2
        assert not running.coordinator.of(pb.CommitBatchRequest)
        done = {
            report.attempt: len(report.receipts)
            for kind in (pb.LeaseWorkRequest, pb.HeartbeatWorkerRequest)
            for request in running.coordinator.of(kind)
            for report in request.done
        }
        assert done == {n + 1: len(engines) for n in ROUNDS}


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "calls"])
def test_shards_get_one_sum_for_all_micro_batches_of_a_worker(shm: bool) -> None:
    """Three rounds of four micro-batches, which all count: each shard gets a fourth of the bytes,
    and a receipt for each micro-batch comes of each."""

    def leases(_coordinator: ScriptedCoordinator, shards: Shards) -> list[Any]:
        named = [[4 * n + index for index in range(4)] for n in ROUNDS]
        decided = [
            Decision(1, n, tuple(Attempt(BatchId(0, one, 1), one + 1) for one in of))
            for n, of in enumerate(named)
        ]
        for engine in shards.engines:
            engine.commands.plan(RoundsAhead(tuple(decided)))
        attempts = [
            pb.AttemptAhead(round=n, attempt=attempt(one))
            for n, of in enumerate(named)
            for one in of
        ]
        return [pb.Lease(rounds=pb.RoundsTask(attempts=attempts))]

    with at_work(leases, "sync", shm=shm, summed=4) as running:
        running.check(*range(12))
        for engine in running.shards.engines:
            report = engine.report()
            assert report.version == len(ROUNDS)
            counters = report.counters
            assert (counters.applied, counters.staged) == (12, 12)
            assert counters.gradient_nbytes == len(ROUNDS) * 4 * WITNESSES
        reports = running.coordinator.reports()
        assert {number: len(one.receipts) for number, one in reports.items()} == {
            n + 1: 2 for n in range(12)
        }
        # Each gradient is a step; the last of a sum ends with its push.
        starts = [start for start, *_ in running.times.rows()]
        assert len(starts) == 12
        assert starts == sorted({*starts})


@pytest.mark.parametrize("count", [1, 2], ids=["one shard", "two shards"])
def test_a_sum_that_a_shard_refuses_comes_one_by_one(count: int) -> None:
    """Shard 0 has one of its micro-batches by itself already. With one shard, the push asks for the
    next round as well."""
    computed: list[int] = []

    def leases(_coordinator: ScriptedCoordinator, shards: Shards) -> list[Any]:
        attempts = [pb.AttemptAhead(round=one // 2, attempt=attempt(one)) for one in range(4)]

        def task() -> pb.Lease:
            at = shards.cluster.shards[0]
            with ShardClient(at.address, at.incarnation, plan_of(count), 0) as client:
                value = np.zeros(2 * WITNESSES // count, np.float32)
                value[0] = -4
                if count == 1:
                    value[WITNESSES] = -4
                first = BatchId(0, 0, 1)
                grant = grant_of("worker-1", first, 1, 1)
                push = GradientPush(first, 1, 0, {ARENA.name: plain(value)}, grant=grant)
                client.push(fence_of(client, 1), push)
            pairs = [[Attempt(BatchId(0, one, 1), one + 1) for one in (n, n + 1)] for n in (0, 2)]
            decided = [Decision(1, n, tuple(pair)) for n, pair in enumerate(pairs)]
            for engine in shards.engines:
                engine.commands.plan(RoundsAhead(tuple(decided)))
            return pb.Lease(rounds=pb.RoundsTask(attempts=attempts))

        return [task]

    with at_work(
        leases, "sync", shm=False, summed=2, during=computed.append, count=count
    ) as running:
        running.check(*range(4))
        # Those of the first round, whose sum was refused, are computed again.
        assert computed == [0, 1, 0, 1, 2, 3]
        for engine in running.shards.engines:
            assert (engine.report().version, engine.report().counters.staged) == (2, 4)
