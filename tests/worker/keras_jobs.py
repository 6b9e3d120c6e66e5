"""Jobs that are trained on real shards in this process, and by plain Keras beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np

from psrpc.core.batch import BatchId
from psrpc.core.commands import Attempt, Decision
from tests.pserver.shards import INITIAL
from tests.worker.flat_jobs import CPU, JobStepper, by_variable
from tests.worker.shards import pushes, serve_shards, standing_alone
from worker import Job
from worker.data.permutation import seed_state
from worker.data.source import Array
from worker.loop.router import Router
from worker.model.variables import seed_variables
from worker.step.keras_step import python_draws_alike
from worker.step.replica import Replica

RATE = 0.5
"""Learning rate of the SGD that the shards have."""


def train(
    job: Job,
    rounds: Sequence[Sequence[BatchId]],
    mode: Literal["async", "sync"] = "sync",
    shards: int = 2,
    described: Mapping[str, Any] | None = None,
) -> dict[str, Array]:
    """Variables after ``rounds``: in sync mode the mean of each, pushed last batch first;
    in async mode the batches of one come from the same parameters, one after another. As the
    job is described, or by SGD."""
    if described is None:
        stepper, options = JobStepper(job, shards=shards), {}
    else:
        state = [v["name"] for v in described["variables"] if v["role"] == "state"]
        stepper = JobStepper(job, CPU, shards, "plain", described["placement"], state)
        options = {"optimizer": described["optimizer"], "engine_kind": described["engine"]}
    plan, values = stepper.plan, stepper.parameters.arrays
    replicas = len(rounds[0]) if mode == "sync" else 0
    with (
        serve_shards(plan, mode, replicas, **options) as served,
        standing_alone() as standing,
        Router(served.cluster, plan, standing) as router,
    ):
        router.initialize(values, INITIAL)
        number = 0
        for turn, batches in enumerate(rounds):
            router.pull(None, values)
            results = []
            for batch in batches:
                result = stepper.run(batch)
                assert result.finite
                copies = [
                    {n: type(e)(e.encoding, tuple(p.copy() for p in e.parts)) for n, e in g.items()}
                    for g in result.gradients
                ]
                number += 1
                results.append((Attempt(batch, number), copies))
            unused = {name: np.empty_like(array) for name, array in values.items()}
            for attempt, gradients in results[::-1] if mode == "sync" else results:
                if mode == "sync":
                    router.push(pushes(router, attempt.batch, attempt.number, gradients))
                else:
                    router.push_pull(
                        pushes(router, attempt.batch, attempt.number, gradients), unused
                    )
            if mode == "sync":
                decided = Decision(1, turn, tuple(attempt for attempt, _ in results))
                for engine in served.engines:
                    engine.commands.decide(decided)
        router.pull(None, values)
    return by_variable(plan, values)


def train_with_keras(
    job: Job, batches: Sequence[BatchId], optimizer: Any = None, *, eagerly: bool = False
) -> dict[str, Array]:
    """The same in one process, a batch at a time, by ``train_on_batch``; random layers draw what
    they draw on a worker. ``eagerly``: without a trace, which takes longer than a few batches."""
    model: Any = Replica(job).model
    optimizer = optimizer or keras.optimizers.SGD(RATE)
    # By itself Keras would do so in a compiled step, where ScheduleFreeAdamW loses its momenta.
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, job.loss, jit_compile=False, run_eagerly=eagerly)
    for batch in batches:
        for index, variable in enumerate(seed_variables(model)):
            variable.assign(seed_state(job.seed, batch, index))
        with python_draws_alike():
            model.train_on_batch(*job.train.read(job.seed, batch))
    return {variable.path: variable.numpy() for variable in model.weights}
