"""Jobs of the dense workloads: any number of variables and no mathematics to speak of."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.workloads import Dense
from worker import Arrays, Job


class Variables(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    """What is trained."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.values = [
            tf.Variable(tf.zeros(dense.shape), name=f"variable_{i}") for i in range(dense.count)
        ]


def no_loss(module: Variables, _x: tf.Tensor, _y: tf.Tensor) -> tf.Tensor:
    """0, with the gradient ``1e-6 * v + 1e-9``: a real loss would cost a pass over the variables
    that the peers do not make either."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def zero(*values: tf.Tensor) -> Any:
        def gradient(_upstream: tf.Tensor) -> list[tf.Tensor]:
            return [1e-6 * value + 1e-9 for value in values]

        return tf.constant(0.0), gradient

    return zero(*(variable.read_value() for variable in module.values))


def dense_job(dense: Dense) -> Job:
    """One epoch of ``dense.steps`` batches without content; no checkpoint during it."""
    nothing = np.zeros((dense.steps, 1), np.float32)
    return Job(
        model=lambda: Variables(dense),
        loss=no_loss,
        optimizer=keras.optimizers.SGD(1e-3),
        train=Arrays(nothing, nothing),
        batch_size=1,
        checkpoint_every=10**9,
        mode="async",
    )
