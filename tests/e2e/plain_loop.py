"""Trains a job file in one process with plain TensorFlow: what a cluster is compared with.

`python -m tests.e2e.plain_loop JOB OUT.npz [KEY=VALUE ...]`; OUT.npz gets every trainable variable
by name. It shares the job file and the order of records with the worker, and nothing else:
gradients come from `tf.GradientTape` on the model's own variables, one micro-batch at a time, and
SGD with momentum is written out in numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from psrpc.core.batch import BatchId, batches_per_epoch, cut_batch
from worker import Job
from worker.data.source import Array
from worker.job.loader import load_job


def rounds_of(job: Job) -> Iterator[list[BatchId]]:
    """The micro-batches of each round of a sync job."""
    assert job.replicas is not None
    records, size = job.train.num_records, job.batch_size
    for epoch in range(job.epochs):
        numbers = range(batches_per_epoch(records, size))
        batches = [cut_batch(epoch, number, records, size) for number in numbers]
        for first in range(0, len(batches), job.replicas):
            yield batches[first : first + job.replicas]


def train(
    job: Job,
    model: Any,
    place: Callable[[Any], Any] = lambda x: x,
    touched: Callable[[Sequence[Any]], dict[int, Array]] = lambda _places: {},
) -> list[Array]:
    """The values of the model's trainable variables after all rounds, in its order.

    Args:
        place: makes the model's input of a job's.
        touched: which rows of a variable, by its number, the inputs of a round name: no other one
            is updated.
    """
    optimizer, loss_of, variables = job.optimizer, job.loss, model.trainable_variables
    assert isinstance(optimizer, keras.optimizers.SGD)
    assert callable(loss_of)
    learning_rate = np.float32(float(optimizer.learning_rate))
    momentum = np.float32(optimizer.momentum)

    def differentiate(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

    gradient = tf.function(differentiate)
    values = [v.numpy() for v in variables]
    velocities = [np.zeros_like(v) for v in values]
    for micro in rounds_of(job):
        total = sum(batch.count for batch in micro)
        means = [np.zeros_like(v) for v in values]
        places = []
        for batch in micro:
            x, y = job.train.read(job.seed, batch)
            places.append(place(x))
            weight = np.float32(batch.count / total)
            for mean, g in zip(means, gradient(places[-1], y), strict=True):
                mean += weight * g.numpy()
        masks = touched(places)
        for n, (value, velocity, mean) in enumerate(zip(values, velocities, means, strict=True)):
            mine: Any = masks.get(n, ...)
            velocity[mine] = momentum * velocity[mine] - learning_rate * mean[mine]
            value[mine] += velocity[mine]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    return values


def main(job_path: str, out: str, *overrides: str) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    job = load_job(Path(job_path), list(overrides)).job
    keras.utils.set_random_seed(job.seed)
    model: Any = job.model()
    names = [v.path for v in model.trainable_variables]
    np.savez(out, **dict(zip(names, train(job, model), strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
