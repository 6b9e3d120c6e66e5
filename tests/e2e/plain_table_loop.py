"""Trains ``jobs/rated.py``, or another such job, in one process on a whole table: what a cluster is
compared with.

`python -m tests.e2e.plain_table_loop JOB OUT.npz [KEY=VALUE ...]`; OUT.npz gets ``ids``, ascending,
their ``rows``, the dense ``kernel`` and ``bias``, how often an update named each id: of every
batch by itself (``batches``), and of rounds of micro-batches (``rounds``), and the ``loss`` of the
model at its end on the job's evaluation data. It shares the network, the data and the order of
records with the job. The table is a variable, trained as :mod:`tests.e2e.plain_loop` does: of rows
those alone that a round has named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.e2e.cluster import JOBS
from tests.e2e.plain_loop import train
from worker.data.ragged import Ragged, as_tensor
from worker.data.source import Array
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
    ragged = isinstance(rated.x, Ragged)
    ids = np.unique(rated.x.values if ragged else rated.x)
    start = keras.initializers.Constant(rated.INITIAL)
    layer = Averaged if ragged else keras.layers.Embedding
    rows = layer(len(ids), rated.WIDTH, embeddings_initializer=start)
    model = rated.network(rows)
    table = next(n for n, v in enumerate(model.trainable_variables) if v is rows.embeddings)
    counts = {"batches": np.zeros(len(ids), np.uint32), "rounds": np.zeros(len(ids), np.uint32)}

    def touched(places: Sequence[Any]) -> dict[int, Array]:
        """The rows that a round names, counted."""
        named = np.zeros((len(places), len(ids)), np.bool_)
        for mask, at in zip(named, places, strict=True):
            mask[np.ravel(at.flat_values if ragged else at)] = True
        counts["batches"] += named.sum(0, dtype=np.uint32)
        counts["rounds"] += named.any(0)
        return {table: np.asarray(named.any(0))}

    values = train(job, model, place, touched)
    assert job.eval is not None
    x, y = job.eval.read_range(0, job.eval.num_records)
    loss_of: Any = job.loss
    loss = float(loss_of(y, model(place(x))))
    dense = [value for n, value in enumerate(values) if n != table]
    found: Any = {"ids": ids, "rows": values[table], "kernel": dense[0], "bias": dense[1], **counts}
    found["loss"] = loss
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
