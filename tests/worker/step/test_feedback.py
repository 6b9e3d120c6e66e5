"""The residual of compression is applied in a worker's loops once on each shard."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from pserver.client.client import ShardClient
from psrpc.core.batch import BatchId
from psrpc.core.encoding import decode
from psrpc.core.errors import StaleGeneration
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_decision
from tests.pserver.shards import fence_of, leased, signed
from tests.worker.flat_jobs import JobStepper, dense_model, make_job
from tests.worker.process.test_trainer import BATCHES, attempt, cluster, task
from tests.worker.scripted_coordinator import INITIALIZE
from tests.worker.shards import Shards, pull_values
from worker.protocol.done import Stopped
from worker.step.layout import Compressor

pytestmark = pytest.mark.slow

TRAINABLE = "float32.trainable"
JOB = make_job(dense_model, compression="topk", topk=0.2)


class PlainLoop:
    """The same in one process: SGD at 0.5."""

    def __init__(self) -> None:
        self._stepper = JobStepper(JOB)
        self._parameters = self._stepper.parameters.arrays[TRAINABLE]
        self._compressor = Compressor(self._stepper.plan, "topk", 0.2)

    def step(self, index: int, unused: Iterable[int] = ()) -> None:
        (arena,) = self._stepper.plan.arenas
        compressed = self._compressor.compress(self._stepper.run(BATCHES[index]).gradients)
        self._compressor.settle(unused)
        for shard in {0, 1} - set(unused):
            (raw,) = compressed[shard][TRAINABLE].parts
            decoded = np.empty(arena.shard_length(shard), np.float32)
            decode("topk", raw, decoded)
            self._parameters[arena.cuts[shard] : arena.cuts[shard + 1]] -= 0.5 * decoded

    def forget(self) -> None:
        self._compressor.forget()

    def check(self, shards: Shards) -> None:
        np.testing.assert_allclose(
            pull_values(shards)[TRAINABLE], self._parameters, rtol=1e-5, atol=1e-7
        )


def test_the_residual_goes_into_the_next_batch() -> None:
    expected = PlainLoop()
    for index in range(4):
        expected.step(index)
    with cluster(JOB) as (coordinator, shards, trainer, _):
        coordinator.leases.extend([INITIALIZE, task(0, 1, 2), task(3)])
        with pytest.raises(Stopped):
            trainer()
        expected.check(shards)


def test_a_worker_that_joins_again_takes_nothing_along() -> None:
    expected = PlainLoop()
    expected.step(0)
    expected.forget()
    expected.step(1)
    with cluster(JOB) as (coordinator, shards, trainer, _):
        coordinator.leases.extend(
            [INITIALIZE, task(0), StaleGeneration("the worker was taken for gone"), task(1)]
        )
        with pytest.raises(Stopped):
            trainer()
        expected.check(shards)


def skip(shards: Shards, shard: int, batch: BatchId) -> None:
    """Has the shard record ``batch`` as another worker's."""
    plan, address = shards.engines[0].plan, shards.cluster.shards[shard]
    with ShardClient(address.address, address.incarnation, plan, shard) as client:
        client.push(fence_of(client, worker="worker-9"), leased("worker-9", batch, 9, 0, None))


def test_a_shard_that_had_the_batch_has_used_nothing() -> None:
    expected = PlainLoop()
    expected.step(0)
    expected.step(1, unused=[0])
    expected.step(2)
    with cluster(JOB) as (coordinator, shards, trainer, _):

        def another_has_done_it_on_one_shard() -> pb.Lease:
            skip(shards, 0, BATCHES[1])
            return task(0, 1, 2)

        coordinator.leases.extend([INITIALIZE, another_has_done_it_on_one_shard])
        with pytest.raises(Stopped):
            trainer()
        expected.check(shards)


def test_a_round_that_has_passed_takes_back_its_own_gradient_alone() -> None:
    expected = PlainLoop()
    for index in (0, 1, 3):
        expected.step(index)
    decisions = [types.Decision(generation=1, round=r) for r in range(4)]
    for number, index in ((0, 0), (1, 1), (3, 3)):
        decisions[number].attempts.append(attempt(index))
    with cluster(JOB, "sync", 1) as (coordinator, shards, trainer, _):

        def go_on_without_the_worker() -> pb.Lease:
            for engine in shards.engines:
                for decision in decisions[1:3]:
                    engine.commands.decide(from_decision(decision))
            return work(2, 2)

        def work(number: int, index: int) -> pb.Lease:
            decision = signed(decisions[number - 1]) if number else None
            return pb.Lease(
                round=pb.RoundWork(round=number, attempt=attempt(index), decision=decision)
            )

        coordinator.leases.extend(
            [INITIALIZE, work(0, 0), work(1, 1), go_on_without_the_worker, work(3, 3)]
        )
        with pytest.raises(Stopped):
            trainer()
        committed = [c.report.attempt for c in coordinator.of(pb.CommitBatchRequest)]
        assert committed == [1, 2, 4]
        for engine in shards.engines:
            engine.commands.decide(from_decision(decisions[3]))
        expected.check(shards)
