"""Jobs, their models, and their flat step without a shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pserver.transport.workspace import Workspace
from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding, wire_dtype
from psrpc.core.placement import make_plan
from psrpc.core.plan import Placement, Plan
from worker import Arrays, Job
from worker.data.source import Array
from worker.model.variables import model_variables
from worker.runtime.devices import HOST, Device, ParameterBuffers
from worker.step.arenas import StepResult
from worker.step.compute import BatchReader
from worker.step.flat import FlatStep
from worker.step.replica import Replica

CPU = Device(HOST, "cpu")
RECORDS, FEATURES, CLASSES = 24, 6, 3


def records(**extra: Any) -> Arrays:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(RECORDS, FEATURES)).astype(np.float32)
    return Arrays(x, generator.integers(0, CLASSES, RECORDS), **extra)


def records_of_floats() -> Arrays:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(RECORDS, FEATURES)).astype(np.float32)
    return Arrays(x, generator.normal(size=(RECORDS, CLASSES)).astype(np.float32))


def make_job(model: Callable[[], Any], **fields: Any) -> Job:
    defaults: dict[str, Any] = {
        "loss": "sparse_categorical_crossentropy",
        "optimizer": "sgd",
        "train": records(),
        "batch_size": 8,
    }
    return Job(model=model, **(defaults | fields))


def dense_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(5, activation="elu", kernel_regularizer=keras.regularizers.L2(0.1)),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def noisy_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


class JobStepper:
    """The flat step of a job, with the model's initial values as parameters."""

    def __init__(
        self,
        job: Job,
        device: Device = CPU,
        shards: int = 2,
        wire: Encoding = "plain",
        placement: Placement = "cut",
        without_gradient: Collection[str] = (),
        plan: Plan | None = None,
    ) -> None:
        self.job = job
        self.replica = Replica(job, device.names)
        found = model_variables(self.replica.model, without_gradient) if plan is None else ()
        self.plan = plan or make_plan([spec for spec, _ in found], shards, placement)
        self.step = FlatStep(
            self.replica.make_step(self.plan),
            self.plan,
            device,
            wire,
            soft_placement=job.soft_placement,
        )
        self.parameters = ParameterBuffers(Workspace(self.plan, wire, shared=False).sets[0])
        for name, values in self.replica.values(self.plan).items():
            self.parameters.arrays[name][:] = values
        self.read = BatchReader(job, device, self.replica.num_seeds())

    def run(self, batch: BatchId) -> StepResult:
        return self.step(self.parameters.tensors, self.read(batch))

    def by_variable(self, result: StepResult) -> dict[str, Array]:
        return by_variable(self.plan, whole(self.plan, result))


def by_variable(plan: Plan, arenas: Mapping[str, Array]) -> dict[str, Array]:
    """Variables by name, in their shapes, as copies."""
    found = {}
    for arena in plan.arenas:
        for index, start in zip(arena.order, arena.starts, strict=True):
            spec = plan.variables[index]
            flat = arenas[arena.name][start : start + spec.size]
            found[spec.name] = flat.reshape(spec.shape).copy()
    return found


def whole(plan: Plan, result: StepResult) -> dict[str, Array]:
    """Whole arenas joined from the shards' parts: name -> ``[length]`` in the arena's dtype."""
    arenas = {}
    for arena in plan.arenas:
        parts = []
        for shard, gradient in enumerate(result.gradients):
            encoded = gradient[arena.name]
            dtype = wire_dtype(encoded.encoding, arena.dtype)
            parts += [np.zeros(0, arena.dtype), *(part.view(dtype) for part in encoded.parts)]
            assert encoded.nbytes == arena.shard_length(shard) * dtype.itemsize
        arenas[arena.name] = np.concatenate([part.astype(arena.dtype) for part in parts])
    return arenas


FIRST = BatchId(0, 0, 8)


class Line(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    """``y = a x + b`` with a running mean of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = tf.Variable(2.0)
        self.offset = tf.Variable([1.0])
        self.mean = tf.Variable(0.0, trainable=False)


def line_loss(line: Line, x: Any, y: Any) -> Any:
    line.mean.assign(0.5 * line.mean + 0.5 * tf.reduce_mean(x))
    if tf.reduce_sum(x) < -1e9:  # becomes part of the graph, as in any tf.function
        return tf.reduce_mean(x)
    return tf.reduce_mean((line.slope * x + line.offset - y) ** 2)
