"""Workers that train embedding tables on real shards, against a loop over whole tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.client.client import CoordinatorClient
from pserver.engine.engine import ShardEngine
from pserver.tables.initial import InitialRows
from pserver.tables.part import TablePart
from psrpc.core.batch import BatchId
from psrpc.core.commands import SnapshotOrder
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Plan, aligned_empty
from psrpc.core.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from psrpc.v1 import types_pb2 as types
from psrpc.wire.commands import from_decision
from tests.pserver.shards import signed
from tests.worker.flat_jobs import CPU, RECORDS
from tests.worker.scripted_coordinator import (
    INITIALIZE,
    ScriptedCoordinator,
    attempt_at,
    serve_script,
    train_task,
)
from tests.worker.shards import Shards, serve_shards, standing_alone
from tests.worker.table_jobs import loaded, make_job, plan_of
from worker import Arrays, Embedding, Job
from worker.data.source import Array
from worker.embedding.row_sets import RowSets
from worker.embedding.rows import Call, IdRule, find_rows
from worker.loop.router import Router
from worker.loop.session import WorkerSession
from worker.process.run import train
from worker.protocol.done import Stopped
from worker.step.feed import Feed
from worker.step.replica import Replica

pytestmark = pytest.mark.slow

USERS, FILMS, W = 9, 6, 4
BATCHES = [BatchId(0, 0, 8), BatchId(0, 8, 8), BatchId(0, 16, 8), BatchId(1, 0, 8)]


def attempt(index: int) -> types.Attempt:
    return attempt_at(BATCHES[index], index + 1)


def task(*indices: int) -> pb.Lease:
    return train_task(*map(attempt, indices))


def factorize(dense: bool) -> keras.Model:
    """The product of two rows, or a dense layer on it."""
    user, film = (keras.Input((), dtype="int64", name=name) for name in ("user", "film"))
    initializer = keras.initializers.RandomNormal(stddev=0.5)
    rows = [
        Embedding(W, USERS, initializer=initializer, name="users")(user),
        Embedding(W, initializer=initializer, name="films")(film),
    ]
    if dense:
        out = keras.layers.Dense(1, name="out")(keras.layers.Multiply()(rows))
    else:
        out = keras.layers.Dot(1)(rows)
    return keras.Model({"user": user, "film": film}, out)


def ratings_job(dense: bool, **fields: Any) -> Job:
    generator = np.random.default_rng(4)
    x = {
        "user": generator.integers(0, USERS, RECORDS),
        "film": generator.integers(0, FILMS, RECORDS),
    }
    return make_job(lambda: factorize(dense), x, **fields)


@contextmanager
def cluster(
    job: Job, plan: Plan, policy: Policy | None = None
) -> Iterator[tuple[ScriptedCoordinator, Shards, partial[None]]]:
    with (
        serve_shards(plan, policy=policy) as shards,
        serve_script(shards.cluster) as coordinator,
        CoordinatorClient(coordinator.address) as client,
        WorkerSession(client, incarnation=7, connect_timeout_s=5) as standing,
    ):
        yield coordinator, shards, partial(train, loaded(job), CPU, standing)


class Loop:
    """The same in one process."""

    def __init__(self, job: Job, plan: Plan, dense: bool) -> None:
        self.job = job
        self.values: dict[str, Array] = {}
        for table, count in zip(plan.tables, (USERS, FILMS), strict=True):
            self.values[table.name] = np.empty((count, W), np.float32)
            InitialRows(table).fill(np.arange(count), self.values[table.name])
        if dense:
            kernel, bias = Replica(job).model.get_layer("out").get_weights()
            self.values |= {"kernel": kernel, "bias": bias}

    def loss(self, values: dict[str, Any], index: int) -> Any:
        x, y = self.job.train.read(self.job.seed, BATCHES[index])
        rows = tf.gather(values["users"], x["user"]) * tf.gather(values["films"], x["film"])
        if "kernel" in values:
            out = (rows @ values["kernel"] + values["bias"])[:, 0]
        else:
            out = tf.reduce_sum(rows, -1)
        return tf.reduce_mean(tf.square(out - y))

    def run(self, rounds: Sequence[Sequence[int]], *, rows_late: bool = False) -> None:
        """The mean of each round's gradients, SGD at 0.5; with ``rows_late`` at rows as they were
        before the last update."""
        before = self.values
        for indices in rounds:
            rows = before if rows_late else self.values
            held = {
                name: tf.constant(rows[name] if name in ("users", "films") else value)
                for name, value in self.values.items()
            }
            with tf.GradientTape() as tape:
                tape.watch(list(held.values()))
                loss = tf.add_n([self.loss(held, index) for index in indices]) / len(indices)
            before = self.values
            self.values = {
                name: before[name] - 0.5 * tf.convert_to_tensor(gradient).numpy()
                for name, gradient in tape.gradient(loss, held).items()
            }


def check(shards: Shards, plan: Plan, loop: Loop) -> None:
    """The shards hold what the loop has come to."""
    calls = [Call(0, IdRule("users")), Call(1, IdRule("films"))]
    needed, places, _ = find_rows(
        plan.tables, calls, [np.arange(USERS), np.arange(FILMS)], plan.shards
    )
    received = RowSets(plan.tables).place(needed)
    into = {arena.name: aligned_empty(arena.length, arena.dtype) for arena in plan.arenas}
    with standing_alone() as standing, Router(shards.cluster, plan, standing) as router:
        router.pull(None, into, rows=received)
    for table, values, at in zip(plan.tables, received.values, places, strict=True):
        np.testing.assert_allclose(values[at], loop.values[table.name], rtol=1e-5, atol=1e-6)
    for flat in into.values():
        expected = np.concatenate([loop.values["kernel"].ravel(), loop.values["bias"]])
        np.testing.assert_allclose(np.sort(flat), np.sort(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dense", [False, True])
def test_async_training_with_one_worker_is_the_plain_loop(dense: bool) -> None:
    job = ratings_job(dense)
    plan = plan_of(job)
    with cluster(job, plan) as (coordinator, shards, trainer):
        coordinator.leases.extend([INITIALIZE, task(0, 1, 2), task(3)])
        with pytest.raises(Stopped):
            trainer()
        loop = Loop(job, plan, dense)
        loop.run([[0], [1], [2], [3]])
        check(shards, plan, loop)


class PatientFeed(Feed[Any]):
    """Reads what is peeked at: that a batch is there in time is no matter of luck."""

    def peek(self, batch: BatchId) -> Any:
        with self._changed:
            while batch in self._expected or self._reading == batch:
                self._changed.wait()
        return super().peek(batch)


def reported(coordinator: ScriptedCoordinator) -> dict[int, Any]:
    """The report on each attempt."""
    return {
        report.attempt: report
        for request in coordinator.requests
        for report in getattr(request, "done", ())
    }


def test_rows_that_are_prefetched_are_a_step_older_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.step.compute.Feed", PatientFeed)
    job = ratings_job(True, prefetch_rows=True)
    plan = plan_of(job)
    with cluster(job, plan) as (coordinator, shards, trainer):
        coordinator.leases.extend([INITIALIZE, task(0, 1, 2)])
        with pytest.raises(Stopped):
            trainer()
        loop = Loop(job, plan, True)
        loop.run([[0], [1], [2]], rows_late=True)
        check(shards, plan, loop)
        # The first batch of a task is not known ahead.
        staleness = {number: report.staleness for number, report in reported(coordinator).items()}
        assert staleness == {1: 0, 2: 1, 3: 1}


def test_prefetched_rows_that_are_too_old_are_refused_and_their_batch_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.step.compute.Feed", PatientFeed)
    job = ratings_job(True, prefetch_rows=True)
    plan = plan_of(job)
    policy = Policy(mode="async", max_staleness=0)
    with cluster(job, plan, policy=policy) as (coordinator, shards, trainer):
        again = task(1)
        again.train.batches[0].attempt = 9
        coordinator.leases.extend([INITIALIZE, task(0, 1, 2), again])
        with pytest.raises(Stopped):
            trainer()
        refused = {number: report.too_stale for number, report in reported(coordinator).items()}
        # The rows of the third are as old as the parameters: nothing was applied in between.
        assert refused == {1: False, 2: True, 3: False, 9: False}
        loop = Loop(job, plan, True)
        loop.run([[0], [2], [1]])
        check(shards, plan, loop)
        assert [engine._counters.too_stale for engine in shards.engines] == [1] * plan.shards


def test_a_gradient_with_a_nan_and_an_id_that_is_not_in_the_vocabulary_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows, slots, counts and versions are those of the batch before them."""

    def read_badly(self: Arrays, seed: int, batch: BatchId) -> Any:
        x, y = read(self, seed, batch)
        if batch == BATCHES[1]:
            y = np.full_like(y, np.nan)
        elif batch == BATCHES[2]:
            x = x | {"user": np.full_like(x["user"], USERS)}
        return x, y

    read = Arrays.read
    monkeypatch.setattr(Arrays, "read", read_badly)
    job = ratings_job(True, optimizer=keras.optimizers.SGD(0.5, momentum=0.5))
    plan = plan_of(job)
    with cluster(job, plan) as (coordinator, shards, trainer):
        coordinator.leases.extend([INITIALIZE, task(0, 1, 2)])
        with pytest.raises(InvalidJob, match=f"layer 'users' was given id {USERS}, which table"):
            trainer()
        assert {n: report.skipped for n, report in reported(coordinator).items()} == {
            1: False,
            2: True,
        }
        loop = Loop(job, plan, True)
        loop.run([[0]])
        check(shards, plan, loop)
        x, _ = job.train.read(job.seed, BATCHES[0])
        for index, (spec, ids) in enumerate(zip(plan.tables, x.values(), strict=True)):
            found = [held_rows(engine, index) for engine in shards.engines]
            assert sorted(np.concatenate([part.ids for part in found])) == np.unique(ids).tolist()
            for part in found:
                initial = np.empty_like(part.values)
                InitialRows(spec).fill(part.ids, initial)
                velocity = part.slots["momentums"]
                np.testing.assert_allclose(initial + velocity, part.values, rtol=0, atol=1e-6)
                assert (part.counts == 1).all()
                assert (part.touched == 1).all()


def held_rows(engine: ShardEngine, table: int) -> TablePart:
    """All rows of a table that a shard holds."""
    frozen = engine._held.tables[table].freeze()
    part = frozen.block(frozen.since(-1))
    frozen.close()
    return part


def test_sync_training_is_the_plain_loop_and_evaluates_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone: list[object] = []

    def watched(router: Router, source: Any, into: Any, *others: Any, **rows: Any) -> None:
        if into is None:
            alone.append(source)
        pull(router, source, into, *others, **rows)

    pull = Router.pull
    monkeypatch.setattr(Router, "pull", watched)
    evaluated = {"user": np.arange(20) % USERS, "film": np.arange(20) % FILMS}
    truth = np.linspace(-1, 1, 20).astype(np.float32)
    job = ratings_job(True, eval=Arrays(evaluated, truth), metrics=["mae"])
    plan = plan_of(job)
    decisions = [
        types.Decision(generation=1, round=r, attempts=[attempt(2 * r), attempt(2 * r + 1)])
        for r in range(2)
    ]
    rounds = [
        pb.RoundWork(round=r, attempt=attempt(i), decision=signed(decisions[0]) if r else None)
        for r, i in ((0, 0), (0, 1), (1, 2), (1, 3))
    ]
    task_ = pb.EvaluateTask(evaluation="epoch-0", task=1, snapshot="step-00000000", stop=20)
    before = Loop(job, plan, True)
    with cluster(job, plan, Policy(mode="sync", replicas=2)) as (coordinator, shards, trainer):

        def keep_a_snapshot() -> pb.Lease:
            for engine in shards.engines:
                engine.commands.take_snapshot(SnapshotOrder("step-00000000", 0, keep=True))
            return pb.Lease(round=rounds[0])

        coordinator.leases.extend(
            [
                INITIALIZE,
                keep_a_snapshot,
                *(pb.Lease(round=work) for work in rounds[1:3]),
                pb.Lease(evaluate=task_),
                pb.Lease(round=rounds[3]),
            ]
        )
        with pytest.raises(Stopped):
            trainer()
        for engine in shards.engines:
            engine.commands.decide(from_decision(decisions[1]))
        after = Loop(job, plan, True)
        after.run([[0, 1], [2, 3]])
        check(shards, plan, after)
        (done,) = [
            request.evaluated
            for request in coordinator.of(pb.ReportWorkRequest)
            if request.HasField("evaluated")
        ]
    # Rows that come by themselves are of the round, or of the snapshot.
    assert alone.count("step-00000000") == 3
    assert {1} <= set(alone) <= {0, 1, "step-00000000"}
    # Of the tables as they were, although a round has been applied since.
    rows = before.values["users"][evaluated["user"]] * before.values["films"][evaluated["film"]]
    out = rows @ before.values["kernel"][:, 0] + before.values["bias"]
    loss, *_ = done.states.variables
    assert loss.values[0] == pytest.approx(float(np.square(out - truth).sum()), rel=1e-5)
    total, count = (variable.values[0] for variable in done.states.variables[1:])
    assert total / count == pytest.approx(float(np.abs(out - truth).mean()), rel=1e-5)
