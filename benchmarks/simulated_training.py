"""Trains a job in one process: a real shard, and workers that compute in turn.

Everything is deterministic, and the staleness is what one asks for. W workers that take turns each
pull right after they have pushed, so W - 1 other updates come in between: every gradient after the
first W is of parameters that are W - 1 updates old. The shard is the project's own, the numpy
engine and its policies included; the model and its data are what a worker runs. Nothing but the
network is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.simulated_shard import Recipe, Shard
from pserver.core.requests import Values
from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId, batches_per_epoch, cut_batch
from psrpc.core.commands import Attempt
from psrpc.core.encoding import Gradient
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan, VariableSpec
from psrpc.core.policy import Policy
from psrpc.v1 import coordinator_pb2 as pb
from worker.data.source import Array
from worker.describe.describe import describe
from worker.embedding.row_sets import ReceivedRows
from worker.job.loader import load_job
from worker.runtime.devices import Device, configure_devices
from worker.runtime.waits import WorkerWaits
from worker.step.compute import BatchReader, GradientComputer
from worker.step.evaluator import Evaluator
from worker.step.replica import Replica


@dataclass
class Trained:
    """Result of a simulation.

    Attributes:
        accuracy: on the test data, after each epoch.
        loss: mean over the training batches of each epoch; NaN if one was.
        staleness: applied gradients by their staleness.
        skipped: batches whose gradient was NaN or infinite.
        refused: gradients that were too stale.
    """

    accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    skipped: int = 0
    refused: int = 0
    updates: int = 0


class Model:
    """A job's model, data and evaluation in this process; use it with ``with``.

    Made once for a seed and trained as often as one likes, always from the same initial values.
    """

    def __init__(self, path: Path, settings: Sequence[str]) -> None:
        # First: a job file that makes an optimizer has used TensorFlow.
        device = the_device()
        loaded = load_job(path, settings)
        self.job = loaded.job
        described = describe(loaded)
        self.optimizer: Mapping[str, object] = described["optimizer"]
        variables = [
            VariableSpec(**(spec | {"shape": tuple(spec["shape"])}))
            for spec in described["variables"]
        ]
        self.plan: Plan = make_plan(variables, 1, described["placement"])
        self._replica = Replica(self.job)
        self.initial: Mapping[str, Array] = self._replica.values(self.plan)
        read = BatchReader(self.job, device, self._replica.num_seeds())
        waits = WorkerWaits(lambda _reason, _waited_s: None)
        self._compute = GradientComputer(self._replica, self.plan, device, read, waits)
        self._evaluator = Evaluator(self._replica, self.plan, device)
        self._evaluations = 0
        self._open = ExitStack()

    def __enter__(self) -> Model:
        self._open.enter_context(self._compute)
        self._compute.renew(Workspace(self.plan, shared=False))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def batches(self, epoch: int) -> list[BatchId]:
        """Of an epoch, in order."""
        records, size = self.job.train.num_records, self.job.batch_size
        count = batches_per_epoch(records, size)
        return [cut_batch(epoch, index, records, size) for index in range(count)]

    def expect(self, batches: Sequence[BatchId]) -> None:
        """They come next, and are read ahead."""
        self._compute.feed.expect(batches)

    def gradient(self, batch: BatchId, parameters: Mapping[str, Array]) -> tuple[Gradient, float]:
        """The shard's gradient of ``batch`` at ``parameters`` (empty where it is not finite), and
        the loss. Valid until the next call but one."""
        self._receive(parameters)
        result = self._compute.gradient(batch, self._compute.read(batch))
        return (result.gradients[0] if result.finite else {}), result.loss

    def accuracy(self, parameters: Mapping[str, Array]) -> float:
        """On the test data."""
        self._evaluations += 1
        name = f"evaluation-{self._evaluations}"
        assert self.job.eval is not None
        task = pb.EvaluateTask(
            evaluation=name, snapshot=name, start=0, stop=self.job.eval.num_records
        )

        def pull(
            _name: str, into: Mapping[str, Array] | None, /, *, rows: ReceivedRows | None = None
        ) -> None:
            # Jobs of these have no embedding tables.
            assert into is not None
            assert rows is None
            for arena, values in parameters.items():
                np.copyto(into[arena], values)

        done = self._evaluator.evaluate(task, 1, pull)
        merged = self._evaluator.merge(pb.MergeEvaluation(evaluation=name, states=done.states))
        return float(merged.results["accuracy"])

    def _receive(self, parameters: Mapping[str, Array]) -> None:
        for name, values in parameters.items():
            np.copyto(self._compute.spare.arrays[name], values)
        self._compute.swap()


@cache
def the_device() -> Device:
    """The CPU, with a fixed number of threads: gradients are the same bits in each run."""
    return configure_devices("none", intra_op_threads=2)


def train(
    model: Model, policy: Policy, workers: int, epochs: int, recipe: Recipe | None = None
) -> Trained:
    """Trains ``model`` from its initial values.

    Args:
        policy: what the shard obeys. With ``sync`` each round is computed from its own version,
            whatever the number of workers.
        workers: that take turns; the staleness is one less.
    """
    shard = Shard(model.plan, model.optimizer, model.initial, policy, recipe or Recipe())
    found = Trained()
    run = _rounds if policy.rounds else _updates
    losses: list[float] = []
    for epoch, values in run(model, shard, policy, workers, epochs, found, losses):
        found.accuracy.append(model.accuracy(values.arrays))
        found.loss.append(float(np.mean(losses)))
        losses.clear()
        assert epoch == len(found.accuracy) - 1
    return found


def _updates(
    model: Model,
    shard: Shard,
    _policy: Policy,
    workers: int,
    epochs: int,
    found: Trained,
    losses: list[float],
) -> Iterator[tuple[int, Values]]:
    """Every gradient as it comes; yields after each epoch."""
    names = [f"worker-{index}" for index in range(workers)]
    held = {name: shard.pull(name) for name in names}
    turn = 0
    for epoch in range(epochs):
        # The worker that has the next turn repeats a refused batch: nothing is lost.
        todo = model.batches(epoch)
        model.expect(todo)
        attempts = dict.fromkeys(todo, 0)
        while todo:
            batch, name = todo.pop(0), names[turn % workers]
            turn += 1
            attempts[batch] += 1
            base = held.pop(name)
            gradient, loss = model.gradient(batch, base.arrays)
            version = base.version
            del base
            outcome, staleness, held[name] = shard.push_pull(
                name, Attempt(batch, attempts[batch]), version, gradient
            )
            if outcome == "too_stale":
                found.refused += 1
                todo.insert(0, batch)
                continue
            losses.append(loss)
            if outcome == "skipped":
                found.skipped += 1
                continue
            found.updates += 1
            found.staleness[staleness] = found.staleness.get(staleness, 0) + 1
        yield epoch, shard.pull(names[0])


def _rounds(
    model: Model,
    shard: Shard,
    policy: Policy,
    workers: int,
    epochs: int,
    found: Trained,
    losses: list[float],
) -> Iterator[tuple[int, Values]]:
    """The mean of K micro-batches at a time; yields after each epoch."""
    assert policy.taken == policy.open, "late gradients need a coordinator"
    for epoch in range(epochs):
        batches = model.batches(epoch)
        model.expect(batches)
        for start in range(0, len(batches), policy.open):
            values = shard.pull("worker-0")
            attempts = [Attempt(batch, 1) for batch in batches[start : start + policy.open]]
            for index, attempt in enumerate(attempts):
                gradient, loss = model.gradient(attempt.batch, values.arrays)
                shard.stage(f"worker-{index % workers}", attempt, values.version, gradient)
                losses.append(loss)
                found.skipped += not gradient
            number = values.version
            del values
            shard.decide(number, attempts)
            found.updates += 1
        yield epoch, shard.pull("worker-0")
