"""Jobs with embedding tables, and what they come to with tables that are held whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.core.description import JobDescription
from coordinator.core.description_reader import parse_description
from psrpc.core.batch import BatchId
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan
from tests.worker.flat_jobs import CPU, FIRST, RECORDS, JobStepper
from worker import Arrays, Embedding, Job
from worker.data.source import Array
from worker.describe.describe import describe
from worker.embedding.row_sets import ReceivedRows, RowSets
from worker.job.loader import LoadedJob
from worker.model.inputs import whole_inputs
from worker.runtime.devices import Device, tensor_of
from worker.step.arenas import StepResult
from worker.step.compute import BatchReader

BATCH = 8
V, W = 7, 4
WEIGHTS = np.linspace(-1, 1, W).astype(np.float32)
"""Vocabulary and width of the one table of :class:`Weighed`, and what it weighs rows by."""

Dense = Mapping[str, Array]
"""Tables whole: name -> float32 ``[vocabulary, width]``."""


def make_job(model: Callable[[], Any], x: Any, **fields: Any) -> Job:
    """A job without dense parameters need not have any; mean squared error of random targets."""
    y = np.random.default_rng(1).normal(size=RECORDS).astype(np.float32)
    defaults: dict[str, Any] = {
        "loss": "mse",
        "optimizer": keras.optimizers.SGD(0.5),
        "train": Arrays(x, y),
        "batch_size": BATCH,
        "engine": "numpy",
    }
    return Job(model=model, **(defaults | fields))


def loaded(job: Job) -> LoadedJob:
    return LoadedJob(job, Path("job.py"), "sha", "job")


def described(job: Job) -> JobDescription:
    """As the coordinator has it."""
    return parse_description(json.dumps(describe(loaded(job))))


def plan_of(job: Job, shards: int = 2) -> Plan:
    found = described(job)
    return make_plan(found.variables, shards, found.placement, found.tables)


def random_tables(plan: Plan) -> Dense:
    generator = np.random.default_rng(2)
    return {
        table.name: generator.normal(size=(table.vocabulary or 100, table.width)).astype(np.float32)
        for table in plan.tables
    }


def fill(plan: Plan, received: ReceivedRows, tables: Dense) -> None:
    """Fills rows as the shards would."""
    for shard in range(plan.shards):
        wanted = received.wanted(shard)
        for index, ids in wanted.ids.items():
            wanted.into[index][:] = tables[plan.tables[index].name][ids]


class TableJobStepper(JobStepper):
    """The flat step of a job with tables."""

    def __init__(self, job: Job, shards: int = 2, device: Device = CPU) -> None:
        super().__init__(job, device, plan=plan_of(job, shards))
        finder = self.replica.make_finder(self.plan)
        inputs = whole_inputs(self.replica.model)
        self.read = BatchReader(job, device, self.replica.num_seeds(), finder, inputs)
        self.tables = random_tables(self.plan)

    def run(self, batch: BatchId = FIRST) -> StepResult:
        given = self.read(batch)
        assert given.needed is not None
        received = RowSets(self.plan.tables).place(given.needed)
        fill(self.plan, received, self.tables)
        return self.step(self.parameters.tensors, given, tuple(map(tensor_of, received.values)))

    def gradients(self, result: StepResult) -> dict[str, Array]:
        """Of the tables, whole; NaN for rows that were not pushed."""
        assert result.finite
        whole = {name: np.full_like(table, np.nan) for name, table in self.tables.items()}
        for part in result.rows:
            for index, rows in part.items():
                name = self.plan.tables[index].name
                assert np.isnan(whole[name][rows.ids]).all(), "a row was pushed twice"
                whole[name][rows.ids] = rows.values
        return whole


def reference(
    job: Job,
    tables: Dense,
    forward: Callable[[Mapping[str, tf.Tensor], Any], tf.Tensor],
) -> tuple[float, dict[str, Array]]:
    """The loss of the first batch and the gradients of whole tables, of a plain tape."""
    x, y = job.train.read(job.seed, FIRST)
    dense = {name: tf.constant(table) for name, table in tables.items()}
    with tf.GradientTape() as tape:
        tape.watch(list(dense.values()))
        predicted = forward(dense, x)
        loss = tf.reduce_mean(tf.square(tf.reshape(predicted, [-1]) - y))
    gradients = tape.gradient(loss, dense)
    return float(loss), {n: tf.convert_to_tensor(g).numpy() for n, g in gradients.items()}


def check_gradients(
    stepper: TableJobStepper,
    forward: Callable[[Mapping[str, tf.Tensor], Any], tf.Tensor],
    rtol: float = 1e-5,
) -> dict[str, Array]:
    """The step's loss and gradients are the plain tape's. Returns the gradients, whole."""
    result = stepper.run()
    loss, expected = reference(stepper.job, stepper.tables, forward)
    np.testing.assert_allclose(result.loss, loss, rtol=rtol)
    found = stepper.gradients(result)
    for name, gradient in expected.items():
        pushed = ~np.isnan(found[name])
        np.testing.assert_allclose(found[name][pushed], gradient[pushed], rtol=rtol, atol=1e-6)
        assert not gradient[~pushed].any()
    return found


def some_ids(*shape: int, low: int = 0, high: int = V) -> Any:
    return np.random.default_rng(0).integers(low, high, (RECORDS, *shape))


class Weighed(keras.Model):  # type: ignore[misc]
    """Weighs the rows that ``look_up`` finds; with ``None`` the layer gets the batch as it is."""

    def __init__(self, prepare: Callable[[Any], Any] | None = None, **arguments: Any) -> None:
        super().__init__()
        self.rows = Embedding(W, arguments.pop("vocabulary", V), name="rows", **arguments)
        self.prepare = prepare

    def call(self, x: Any) -> Any:
        return tf.reduce_sum(self.rows(self.prepare(x) if self.prepare else x) * WEIGHTS, -1)
