"""Gradients of a worker in a job that compresses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.placement import make_plan
from tests.worker.flat_jobs import CPU, dense_model, make_job
from worker.model.variables import model_variables
from worker.runtime.waits import WorkerWaits
from worker.step.arenas import StepResult
from worker.step.compute import BatchReader, GradientComputer
from worker.step.flat import FlatStep
from worker.step.replica import Replica

pytestmark = pytest.mark.slow

TRAINABLE = "float32.trainable"
ONE, OTHER = BatchId(0, 0, 8), BatchId(0, 8, 8)


class Worker:
    """A compute whose parameters are the model's first ones."""

    def __init__(self) -> None:
        replica = Replica(make_job(dense_model, compression="topk", topk=0.2))
        self.plan = make_plan([spec for spec, _ in model_variables(replica.model)], 2, "cut")
        read = BatchReader(replica.job, CPU, replica.num_seeds())
        self.waits = WorkerWaits(print)
        self.compute = GradientComputer(replica, self.plan, CPU, read, self.waits)
        self.values = replica.values(self.plan)
        self.renew()

    def renew(self) -> None:
        self.compute.renew(Workspace(self.plan, shared=False))
        self.receive(0)

    def receive(self, extra: float) -> None:
        for name, values in self.values.items():
            self.compute.spare.arrays[name][:] = values + np.float32(extra)
        self.compute.swap()

    def run(self, batch: BatchId) -> StepResult:
        return self.compute.gradient(batch, self.compute.read(batch))


def sent(result: StepResult) -> list[bytes]:
    """The encoded gradients of the trainable variables."""
    assert [gradient[TRAINABLE].encoding for gradient in result.gradients] == ["topk"] * 2
    return [part.tobytes() for each in result.gradients for part in each[TRAINABLE].parts]


@pytest.fixture
def fresh() -> list[bytes]:
    """The first batch's gradients as a worker sends them."""
    return sent(Worker().run(ONE))


def test_the_residual_is_in_the_next_gradient(fresh: list[bytes]) -> None:
    worker = Worker()
    assert sent(worker.run(ONE)) == fresh
    worker.compute.settle()
    assert sent(worker.run(ONE)) != fresh


def test_a_gradient_that_is_taken_back_leaves_no_trace(fresh: list[bytes]) -> None:
    worker = Worker()
    worker.run(OTHER)
    worker.compute.take_back()
    assert sent(worker.run(ONE)) == fresh


def test_each_shard_has_what_it_did_not_use_taken_back(fresh: list[bytes]) -> None:
    worker = Worker()
    worker.run(OTHER)
    worker.compute.settle(unused=[1])
    found = sent(worker.run(ONE))
    assert found[0] != fresh[0]
    assert found[1] == fresh[1]


def test_a_worker_that_joins_again_begins_with_nothing_left_out(fresh: list[bytes]) -> None:
    worker = Worker()
    worker.run(OTHER)
    worker.compute.settle()
    worker.run(OTHER)
    worker.compute.leave()
    worker.renew()
    assert sent(worker.run(ONE)) == fresh


def test_a_batch_that_is_skipped_leaves_what_was_there() -> None:
    one, other = Worker(), Worker()
    for worker in (one, other):
        worker.run(OTHER)
        worker.compute.settle()
    one.receive(np.nan)
    assert not one.run(ONE).finite
    # That of the batch before, which was used, is not taken back with it.
    one.compute.take_back()
    one.receive(0)
    assert sent(one.run(ONE)) == sent(other.run(ONE))


def test_the_first_batch_of_a_shape_says_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, said = Worker(), []
    ready, run = worker.compute.read(ONE), FlatStep.__call__

    def telling(step: FlatStep, *args: Any) -> StepResult:
        said.append(worker.waits.reason())
        return run(step, *args)

    monkeypatch.setattr(FlatStep, "__call__", telling)
    for given in (ready, ready, worker.compute.read(BatchId(0, 0, 4))):
        worker.compute.gradient(ONE, given)
    assert said == ["compiling 4 variables", "", "compiling 4 variables"]
    assert worker.waits.reason() == ""
