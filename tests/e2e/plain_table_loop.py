"""Trains ``jobs/rated.py``, or another such job, in one process on a whole table: what a cluster is
compared with.

`python -m tests.e2e.plain_table_loop JOB OUT.npz [KEY=VALUE ...]`; OUT.npz gets ``ids``, ascending,
their ``rows``, the dense ``kernel`` and ``bias``, how often an update named each id: of every
batch by itself (``batches``), and of rounds of micro-batches (``rounds``), and the ``loss`` of the
model at its end on the job's evaluation data. It shares the network, the data and the order of
records with the job. The table is a variable, gradients come from `tf.GradientTape`, and SGD with
momentum is written out in numpy: of rows on those alone that a round has named.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from psrpc.core.batch import batches_per_epoch, cut_batch
from tests.e2e.cluster import JOBS
from worker.data.ragged import Ragged, as_tensor
from worker.job.loader import load_job


class Averaged(keras.layers.Embedding):  # type: ignore[misc]  # Keras has no types
    """Rows of ragged places averaged by TensorFlow's own function; zeros where there are none."""

    def call(self, places: tf.RaggedTensor) -> tf.Tensor:
        # Of a variable it takes parts one by one.
        table = tf.convert_to_tensor(self.embeddings)
        return tf.nn.safe_embedding_lookup_sparse(table, places.to_sparse(), combiner="mean")


def main(name: str, out: str, *overrides: str) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Which starts TensorFlow.
    rated = import_module(f"tests.e2e.jobs.{name}")

    def place(x: Any) -> Any:
        """Ids as places in the table."""
        if isinstance(x, Ragged):
            return as_tensor(Ragged(np.searchsorted(ids, x.values), x.row_splits))
        return np.searchsorted(ids, x)

    job = load_job(JOBS / f"{name}.py", list(overrides)).job
    assert job.replicas is not None
    ragged = isinstance(rated.x, Ragged)
    ids = np.unique(rated.x.values if ragged else rated.x)
    start = keras.initializers.Constant(rated.INITIAL)
    layer = Averaged if ragged else keras.layers.Embedding
    rows = layer(len(ids), rated.WIDTH, embeddings_initializer=start)
    model = rated.network(rows)
    variables = model.trainable_variables
    table = next(n for n, v in enumerate(variables) if v is rows.embeddings)
    loss_of: Any = job.loss

    def differentiate(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

    gradient = tf.function(differentiate)
    values = [v.numpy() for v in variables]
    velocities = [np.zeros_like(v) for v in values]
    counts = {"batches": np.zeros(len(ids), np.uint32), "rounds": np.zeros(len(ids), np.uint32)}
    records = job.train.num_records
    for epoch in range(job.epochs):
        batches = [
            cut_batch(epoch, i, records, job.batch_size)
            for i in range(batches_per_epoch(records, job.batch_size))
        ]
        for first in range(0, len(batches), job.replicas):
            micro = batches[first : first + job.replicas]
            total = sum(batch.count for batch in micro)
            means = [np.zeros_like(v) for v in values]
            touched = np.zeros(len(ids), np.bool_)
            for batch in micro:
                x, y = job.train.read(job.seed, batch)
                at = place(x)
                named = np.zeros(len(ids), np.bool_)
                named[np.ravel(at.flat_values if ragged else at)] = True
                counts["batches"] += named
                touched |= named
                weight = np.float32(batch.count / total)
                for mean, g in zip(means, gradient(at, y), strict=True):
                    mean += weight * g.numpy()
            counts["rounds"] += touched
            for n, (value, velocity, mean) in enumerate(
                zip(values, velocities, means, strict=True)
            ):
                mine: Any = touched if n == table else ...
                step = np.float32(rated.RATE) * mean[mine]
                velocity[mine] = np.float32(rated.MOMENTUM) * velocity[mine] - step
                value[mine] += velocity[mine]
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
    assert job.eval is not None
    x, y = job.eval.read_range(0, job.eval.num_records)
    loss = float(loss_of(y, model(place(x))))
    dense = [value for n, value in enumerate(values) if n != table]
    found: Any = {"ids": ids, "rows": values[table], "kernel": dense[0], "bias": dense[1], **counts}
    found["loss"] = loss
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
