"""Gradients of rounds that were decided ahead, at two real shards."""

from __future__ import annotations

from typing import Any

import pytest

from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision, RoundsAhead
from psrpc.v1 import coordinator_pb2 as pb
from tests.worker.loop.fixtures import at_work, attempt
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
