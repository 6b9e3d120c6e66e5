"""Trains a job file in one process with plain TensorFlow: what a cluster is compared with.

`python -m tests.e2e.plain_loop JOB OUT.npz [KEY=VALUE ...]`; OUT.npz gets every trainable variable
by name. It shares the job file and the order of records with the worker, and nothing else:
gradients come from `tf.GradientTape` on the model's own variables, one micro-batch at a time, and
SGD with momentum is written out in numpy.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from psrpc.core.batch import batches_per_epoch, cut_batch
from worker.job.loader import load_job


def main(job_path: str, out: str, *overrides: str) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    job = load_job(Path(job_path), list(overrides)).job
    keras.utils.set_random_seed(job.seed)
    model: Any = job.model()
    optimizer: Any = job.optimizer
    learning_rate = np.float32(float(optimizer.learning_rate))
    momentum = np.float32(optimizer.momentum)
    assert job.replicas is not None

    loss_of: Any = job.loss

    def differentiate(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    gradient = tf.function(differentiate)
    values = [v.numpy() for v in model.trainable_variables]
    velocities = [np.zeros_like(v) for v in values]
    records = job.train.num_records
    for epoch in range(job.epochs):
        batches = [
            cut_batch(epoch, i, records, job.batch_size)
            for i in range(batches_per_epoch(records, job.batch_size))
        ]
        for start in range(0, len(batches), job.replicas):
            micro = batches[start : start + job.replicas]
            total = sum(batch.count for batch in micro)
            means = [np.zeros_like(v) for v in values]
            for n, batch in enumerate(micro):
                gradients = gradient(*job.train.read(job.seed, batch))
                weight = np.float32(batch.count / total)
                for mean, g in zip(means, gradients, strict=True):
                    mean[...] = weight * g.numpy() if n == 0 else mean + weight * g.numpy()
            for value, velocity, mean in zip(values, velocities, means, strict=True):
                velocity[...] = momentum * velocity - learning_rate * mean
                value += velocity
            for variable, value in zip(model.trainable_variables, values, strict=True):
                variable.assign(value)
    names = [v.path for v in model.trainable_variables]
    np.savez(out, **dict(zip(names, values, strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
