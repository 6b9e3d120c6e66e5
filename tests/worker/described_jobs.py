"""Jobs to be described, and their descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from worker import Arrays, Job
from worker.describe.describe import describe
from worker.job.loader import LoadedJob

layers = keras.layers


def dense(units: int = 3, **options: Any) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(units, **options)])


def classes(records: int = 60, count: int = 3, *, column: bool = False) -> Arrays:
    labels = np.arange(records) % count
    return Arrays(np.ones((records, 4), np.float32), labels[:, None] if column else labels)


def make_job(**fields: Any) -> Job:
    return Job(
        **{
            "model": dense,
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "optimizer": "sgd",
            "metrics": ["accuracy"],
            "train": classes(),
            "batch_size": 10,
            **fields,
        }
    )


def loaded(job: Job, **arguments: str) -> LoadedJob:
    return LoadedJob(job, Path("/jobs/example.py"), "ab" * 32, "example", arguments)


def described(**fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(describe(loaded(make_job(**fields)))))
    return document


class Line(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = [{"w": tf.Variable(tf.zeros([4, 1]))}, tf.Variable(0.0)]
        self.seen = tf.Variable(0.0, trainable=False)


def line_loss(module: Line, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    predicted = x @ module.layers[0]["w"] + module.layers[1]
    module.seen.assign_add(1.0)
    return tf.reduce_mean(tf.square(predicted - tf.cast(y, tf.float32)))


def one_hot() -> Arrays:
    return Arrays(np.ones((60, 4), np.float32), np.eye(3)[np.arange(60) % 3])


def text_labels(kind: str) -> Arrays:
    return Arrays(np.ones((60, 4), np.float32), np.array(["cat", "cat", "cat"] * 20).astype(kind))


def spoilt(record: int, label: float) -> Arrays:
    labels = (np.arange(60) % 3).astype(np.float64)
    labels[record] = label
    return Arrays(np.ones((60, 4), np.float32), labels)
