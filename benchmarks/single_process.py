"""Trains a job file in one process with plain Keras: what a cluster is compared with.

    python benchmarks/single_process.py JOB [--set KEY=VALUE]... [--out VARIABLES.npz]

It shares the job file and the seeded order of records with the worker, and nothing of the
parameter path: one compiled `tf.function` with a `tf.GradientTape` and `optimizer.apply` on the
model's own variables, batch by batch, as a user without a cluster would write it. Prints one line
of JSON: steps, seconds of training, and the evaluation by metric name.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pserver.updates.keras_objects import rebuild
from psrpc.batch import batches_per_epoch, cut_batch
from worker.build import build_model, serialized_optimizer
from worker.loader import load_job


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    # One process updates once per batch, which is what asynchronous mode counts.
    loaded = load_job(args.job, [*args.settings, "mode=async"])
    job = loaded.job
    assert job.eval is not None, "the job has no evaluation data"
    model = build_model(job, job.train.read_range(0, 2))
    optimizer = rebuild(
        "optimizer",
        serialized_optimizer(job, loaded.optimizer_arguments, model.trainable_variables),
    )
    model.compile(optimizer, job.loss, metrics=list(job.metrics))
    loss_of: Any = keras.losses.get(job.loss) if isinstance(job.loss, str) else job.loss
    optimizer.build(model.trainable_variables)

    def update(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    step = tf.function(update)
    records = job.train.num_records
    batches = [
        cut_batch(epoch, i, records, job.batch_size)
        for epoch in range(job.epochs)
        for i in range(batches_per_epoch(records, job.batch_size))
    ]
    start = time.perf_counter()
    for batch in batches:
        step(*map(tf.convert_to_tensor, job.train.read(job.seed, batch)))
    seconds = time.perf_counter() - start
    x, y = job.eval.read_range(0, job.eval.num_records)
    results = model.evaluate(x, y, batch_size=1000, verbose=0, return_dict=True)
    if args.out is not None:
        np.savez(args.out, **{v.path: v.numpy() for v in model.variables})
    line = {"steps": len(batches), "train_s": round(seconds, 1), "eval": results}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
