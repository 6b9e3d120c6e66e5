from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.client.client import CoordinatorClient
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import JobFailed, JobMismatch, StaleGeneration
from psrpc.core.placement import make_plan
from psrpc.options.job_keys import UserCodeFailed
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_decision
from tests.pserver.shards import signed
from tests.worker.flat_jobs import (
    CPU,
    JobStepper,
    dense_model,
    make_job,
    noisy_model,
    records,
    whole,
)
from tests.worker.scripted_coordinator import (
    INITIALIZE,
    ScriptedCoordinator,
    attempt_at,
    serve_script,
    train_task,
)
from tests.worker.shards import Shards, pull_values, serve_shards
from worker import Arrays, Job
from worker.data.source import Batch
from worker.job.loader import LoadedJob
from worker.loop.session import WorkerSession
from worker.model.variables import model_variables
from worker.process.run import train
from worker.protocol.done import Stopped
from worker.step.evaluator import Evaluator
from worker.step.replica import Replica

pytestmark = pytest.mark.slow

BATCHES = [BatchId(0, 0, 8), BatchId(0, 8, 8), BatchId(0, 16, 8), BatchId(1, 0, 8)]


def attempt(index: int, number: int | None = None) -> types.Attempt:
    return attempt_at(BATCHES[index], index + 1 if number is None else number)


def task(*indices: int) -> pb.Lease:
    return train_task(*map(attempt, indices))


@contextmanager
def cluster(
    job: Job, mode: Literal["async", "sync"] = "async", replicas: int = 0
) -> Iterator[tuple[ScriptedCoordinator, Shards, partial[None], WorkerSession]]:
    """Two real shards, a scripted coordinator and a trainer."""
    plan = make_plan([spec for spec, _ in model_variables(Replica(job).model)], 2, "cut")
    with (
        serve_shards(plan, mode, replicas) as shards,
        serve_script(shards.cluster) as coordinator,
        CoordinatorClient(coordinator.address) as client,
        WorkerSession(client, incarnation=7, connect_timeout_s=5) as standing,
    ):
        loaded = LoadedJob(job, Path("job.py"), "sha", "job")
        yield coordinator, shards, partial(train, loaded, CPU, standing), standing


def plain_loop(job: Job, rounds: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The same in one process: the mean of each round's gradients, SGD at 0.5."""
    stepper = JobStepper(job)
    arrays = stepper.parameters.arrays
    for indices in rounds:
        results = [whole(stepper.plan, stepper.run(BATCHES[index])) for index in indices]
        weight = np.float32(1 / len(indices))
        for name, array in arrays.items():
            mean = weight * results[0][name]
            for result in results[1:]:
                mean += weight * result[name]
            array += mean if name.endswith("state") else np.float32(-0.5) * mean
    return {name: array.copy() for name, array in arrays.items()}


def test_async_training_with_one_worker_is_the_plain_loop() -> None:
    job = make_job(noisy_model)
    with cluster(job) as (coordinator, shards, trainer, _):
        coordinator.leases.extend([INITIALIZE, task(0, 1, 2), task(3)])
        with pytest.raises(Stopped):
            trainer()
        for name, expected in plain_loop(job, [[0], [1], [2], [3]]).items():
            np.testing.assert_allclose(pull_values(shards)[name], expected, rtol=1e-6, atol=1e-7)
        reported = {
            report.attempt
            for request in coordinator.requests
            for report in getattr(request, "done", ())
        }
        assert reported == {1, 2, 3, 4}
        assert coordinator.of(pb.ReportWorkRequest)[0].HasField("initialized")


def test_sync_training_is_the_plain_loop_bit_by_bit() -> None:
    job = make_job(noisy_model)
    decisions = [
        types.Decision(generation=1, round=r, attempts=[attempt(2 * r), attempt(2 * r + 1)])
        for r in range(2)
    ]
    rounds = [
        pb.RoundWork(round=r, attempt=attempt(i), decision=signed(decisions[0]) if r else None)
        for r, i in ((0, 0), (0, 1), (1, 2), (1, 3))
    ]
    with cluster(job, "sync", 2) as (coordinator, shards, trainer, _):
        coordinator.leases.extend([INITIALIZE, *(pb.Lease(round=work) for work in rounds)])
        with pytest.raises(Stopped):
            trainer()
        commits = coordinator.of(pb.CommitBatchRequest)
        assert [(c.round, c.report.attempt) for c in commits] == [(0, 1), (0, 2), (1, 3), (1, 4)]
        for engine in shards.engines:
            engine.commands.decide(from_decision(decisions[1]))
        for name, expected in plain_loop(job, [[0, 1], [2, 3]]).items():
            assert pull_values(shards)[name].tobytes() == expected.tobytes()


def test_an_evaluation_in_the_middle_of_a_round_leaves_the_round_alone() -> None:
    job = make_job(dense_model, eval=records())
    evaluate = pb.EvaluateTask(evaluation="epoch-0", task=1, snapshot="step-00000000", stop=24)
    first = types.Decision(generation=1, round=0, attempts=[attempt(0), attempt(1)])
    with cluster(job, "sync", 2) as (coordinator, shards, trainer, _):

        def keep_a_snapshot() -> pb.Lease:
            for engine in shards.engines:
                engine.commands.take_snapshot(SnapshotOrder("step-00000000", 0, keep=True))
            return pb.Lease(round=pb.RoundWork(round=0, attempt=attempt(0)))

        coordinator.leases.extend(
            [
                INITIALIZE,
                keep_a_snapshot,
                pb.Lease(round=pb.RoundWork(round=0, attempt=attempt(1))),
                pb.Lease(round=pb.RoundWork(round=1, attempt=attempt(2), decision=signed(first))),
                pb.Lease(evaluate=evaluate),
                pb.Lease(round=pb.RoundWork(round=1, attempt=attempt(3), decision=signed(first))),
            ]
        )
        with pytest.raises(Stopped):
            trainer()
        commits = coordinator.of(pb.CommitBatchRequest)
        assert [(c.round, c.report.attempt) for c in commits] == [(0, 1), (0, 2), (1, 3), (1, 4)]


def test_another_generation_makes_the_worker_join_again() -> None:
    job = make_job(dense_model)
    with cluster(job) as (coordinator, shards, trainer, _):
        coordinator.leases.extend(
            [INITIALIZE, task(0), StaleGeneration("generation 2 has begun"), task(1)]
        )
        with pytest.raises(Stopped):
            trainer()
        assert len(coordinator.of(pb.RegisterWorkerRequest)) == 2
        assert [engine.report().version for engine in shards.engines] == [2, 2]


def test_the_memory_of_the_last_workspace_is_given_back_before_there_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Watched(Workspace):
        def __init__(self, *arguments: Any) -> None:
            alive.append(sum(known() is not None for known in made))
            super().__init__(*arguments)
            memory = self.sets[0]["float32.trainable"]
            while isinstance(memory.base, np.ndarray):
                memory = memory.base
            made.append(weakref.ref(memory))

    monkeypatch.setattr("worker.loop.joined.Workspace", Watched)
    with cluster(make_job(dense_model)) as (coordinator, shards, trainer, _):

        def take_for_gone() -> pb.Lease:
            coordinator.cluster.shards[1].incarnation += 1
            raise StaleGeneration("the worker was taken for gone")

        def refuse_on_a_shard() -> pb.Lease:
            coordinator.cluster.shards[1].incarnation -= 1
            return task(1)

        coordinator.leases.extend([INITIALIZE, task(0), take_for_gone, refuse_on_a_shard, task(1)])
        with pytest.raises(Stopped):
            trainer()
        assert [engine.report().version for engine in shards.engines] == [2, 2]
    assert alive == [0, 0, 0]


def test_a_gradient_that_is_not_finite_is_skipped_on_all_shards() -> None:
    x, y = records().read_range(0, 24)
    x[3] = np.nan
    job = make_job(dense_model, train=Arrays(x, y), batch_size=24)
    whole = types.Attempt(batch=types.BatchId(epoch=0, first=0, count=24), attempt=1)
    with cluster(job) as (coordinator, shards, trainer, _):
        coordinator.leases.extend([INITIALIZE, pb.Lease(train=pb.TrainTask(batches=[whole]))])
        with pytest.raises(Stopped):
            trainer()
        for engine in shards.engines:
            assert engine.report().counters.skipped == 1
        for name, expected in plain_loop(make_job(dense_model), []).items():
            np.testing.assert_array_equal(pull_values(shards)[name], expected)
        reports = [r for q in coordinator.requests for r in getattr(q, "done", ())]
        assert all(report.skipped for report in reports)
        assert reports


class Halves(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    """One variable for each of two shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = tf.Variable(tf.ones(16))
        self.second = tf.Variable(tf.zeros(16))


def test_a_gradient_that_is_not_finite_on_one_shard_is_skipped_on_all() -> None:
    """Each shard by itself would apply its part, or not."""

    def loss(halves: Halves, x: Any, _y: Any) -> Any:
        # The root has an infinite slope at zero.
        root = tf.sqrt(halves.second) if tf.reduce_sum(x) > 20 else halves.second
        return tf.reduce_sum(halves.first) + tf.reduce_sum(root)

    x = np.arange(24, dtype=np.float32)
    job = make_job(Halves, loss=loss, train=Arrays(x, x), batch_size=24)
    with cluster(job) as (coordinator, shards, trainer, _):
        whole_epoch = types.BatchId(epoch=0, first=0, count=24)
        attempts = [types.Attempt(batch=whole_epoch, attempt=1)]
        coordinator.leases.extend([INITIALIZE, pb.Lease(train=pb.TrainTask(batches=attempts))])
        with pytest.raises(Stopped):
            trainer()
        assert [engine.report().counters.skipped for engine in shards.engines] == [1, 1]
        assert [engine.report().version for engine in shards.engines] == [0, 0]
        reports = [r for q in coordinator.requests for r in getattr(q, "done", ())]
        assert reports
        assert all(report.skipped for report in reports)


class Broken(Arrays):
    def read(self, seed: int, batch: BatchId) -> Batch:
        if batch.first == 8:
            raise RuntimeError("disk on fire\nand more")
        return super().read(seed, batch)


def test_a_data_source_that_raises_fails_the_job_for_everybody() -> None:
    x, y = records().read_range(0, 24)
    with cluster(make_job(dense_model, train=Broken(x, y))) as (coordinator, _, trainer, _):
        coordinator.leases.extend([INITIALIZE, task(0, 1)])
        with pytest.raises(UserCodeFailed, match=r"^train raised RuntimeError: disk on fire$"):
            trainer()
        (left,) = coordinator.of(pb.LeaveWorkerRequest)
        assert left.fatal
        assert left.reason == "PS103: train raised RuntimeError: disk on fire"


def test_a_step_that_raises_names_the_batch() -> None:
    def loss(y: Any, _p: Any) -> Any:
        raise TypeError("labels are wrong")

    job = make_job(dense_model, loss=loss)
    with cluster(job) as (coordinator, _, trainer, _):
        coordinator.leases.extend([INITIALIZE, task(0)])
        expected = r"the training step on epoch 1 positions 0..7 raised TypeError"
        with pytest.raises(UserCodeFailed, match=expected):
            trainer()
        assert coordinator.of(pb.LeaveWorkerRequest)[0].fatal


def test_a_model_other_than_the_plan_is_refused() -> None:
    def wider() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, name="dense")])

    plan = make_plan([s for s, _ in model_variables(Replica(make_job(wider)).model)], 1, "cut")
    with cluster(make_job(dense_model)) as (coordinator, _, trainer, _):
        coordinator.cluster.plan = plan.to_json()
        with pytest.raises(JobMismatch, match="variable 'sequential/dense_1/kernel' is only here"):
            trainer()
        (left,) = coordinator.of(pb.LeaveWorkerRequest)
        assert not left.fatal


def test_evaluation_reads_a_kept_snapshot_while_training_goes_on() -> None:
    job = make_job(dense_model, metrics=["accuracy"], eval=records())
    task_of = pb.EvaluateTask(evaluation="epoch-0", task=1, snapshot="step-00000000", stop=24)
    with cluster(job) as (coordinator, shards, trainer, _):

        def evaluate_now() -> pb.Lease:
            for engine in shards.engines:
                engine.commands.take_snapshot(SnapshotOrder("step-00000000", 0, keep=True))
            return evaluate_later

        evaluate_later = pb.Lease(evaluate=task_of)

        coordinator.leases.extend([INITIALIZE, evaluate_now, task(0), evaluate_later])
        with pytest.raises(Stopped):
            trainer()
        _, first, second = coordinator.of(pb.ReportWorkRequest)

    plain = JobStepper(job)
    expected = Evaluator(plain.replica, plain.plan, CPU).states(plain.parameters, 0, 24)
    for found in (first.evaluated, second.evaluated):
        assert (found.evaluation, found.task, found.records) == ("epoch-0", 1, 24)
        for state, other in zip(found.states.variables, expected, strict=True):
            np.testing.assert_allclose(state.values, other.values, rtol=1e-5)


def test_the_end_of_a_failed_job_is_told() -> None:
    failed = pb.Lease(finished=pb.Shutdown(failed=True, reason="the loss diverged"))
    with cluster(make_job(dense_model)) as (coordinator, _, trainer, _):
        coordinator.leases.append(failed)
        with pytest.raises(JobFailed, match="the loss diverged"):
            trainer()
