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
from psrpc.core.batch import batches_per_epoch, cut_batch
from worker.job.job import Job
from worker.job.loader import load_job
from worker.job.plateau import parse_stop_early
from worker.model.build import build_model, serialized_optimizer


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
        serialized_optimizer(
            job, loaded.optimizer_arguments, [(v.path, v) for v in model.trainable_variables]
        ),
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
    per_epoch = batches_per_epoch(records, job.batch_size)
    early = None if job.stop_early is None else EarlyStop(job.stop_early, model)
    start = time.perf_counter()
    epoch = 0
    while epoch < job.epochs:
        for i in range(per_epoch):
            batch = cut_batch(epoch, i, records, job.batch_size)
            step(*map(tf.convert_to_tensor, job.train.read(job.seed, batch)))
        epoch += 1
        if early is not None and early.stops(evaluate(job, model)):
            break
    seconds = time.perf_counter() - start
    if early is not None:
        early.restore()
    results = evaluate(job, model)
    if args.out is not None:
        np.savez(args.out, **{v.path: v.numpy() for v in model.variables})
    line = {
        "steps": epoch * per_epoch,
        "train_s": round(seconds, 1),
        "cpu_s": round(time.process_time(), 1),
        "eval": results,
    }
    if early is not None:
        line["best"] = {"epoch": early.best}
    sys.stdout.write(json.dumps(line) + "\n")


def evaluate(job: Job, model: keras.Model) -> dict[str, float]:
    """The results on the evaluation data."""
    assert job.eval is not None  # main has checked it
    x, y = job.eval.read_range(0, job.eval.num_records)
    found: dict[str, float] = model.evaluate(x, y, batch_size=1000, verbose=0, return_dict=True)
    return found


class EarlyStop:
    """``Job.stop_early`` as Keras's own callback has it."""

    def __init__(self, text: str, model: keras.Model) -> None:
        found = parse_stop_early(text)
        self._callback = keras.callbacks.EarlyStopping(
            monitor=found["metric"],
            mode="min" if found["lower"] else "max",
            patience=found["patience"],
            min_delta=found["min_delta"],
            restore_best_weights=found["restore_best"],
        )
        self._callback.set_model(model)
        model.stop_training = False
        self._callback.on_train_begin()
        self._epoch = 0
        self._model = model

    def stops(self, results: dict[str, float]) -> bool:
        """Whether training ends after this epoch."""
        self._callback.on_epoch_end(self._epoch, results)
        self._epoch += 1
        return bool(self._model.stop_training)

    @property
    def best(self) -> int:
        """The best epoch, from 1."""
        return int(self._callback.best_epoch) + 1

    def restore(self) -> None:
        """Gives the model the best epoch's weights, if it is to have them."""
        self._callback.on_train_end()


if __name__ == "__main__":
    main()
