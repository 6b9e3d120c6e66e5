"""A plain ``tf.Module`` with a loss of its own: a line through points.

coordinator up examples/module_regression.py --shards 1 --workers 2
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from pserver import Arrays, Job

SLOPES = np.array([2.0, -3.0, 0.5], np.float32)
INTERCEPT = np.float32(1.0)


class Line(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    def __init__(self) -> None:
        super().__init__()
        self.slopes = tf.Variable(tf.zeros([3]))
        self.intercept = tf.Variable(0.0)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.linalg.matvec(x, self.slopes) + self.intercept


def mean_squared_error(module: Line, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(module(x) - y))


def points(count: int, seed: int) -> Arrays:
    """Points of the line with some noise; every process makes the same ones."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 3)).astype(np.float32)
    noise = random.normal(scale=0.1, size=count).astype(np.float32)
    return Arrays(x, x @ SLOPES + INTERCEPT + noise)


job = Job(
    model=Line,
    loss=mean_squared_error,
    optimizer="sgd",
    train=points(2000, seed=1),
    eval=points(500, seed=2),
    batch_size=20,
    epochs=5,
    mode="async",
)
