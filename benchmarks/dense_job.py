"""Jobs of the dense workloads: any number of variables and no mathematics to speak of."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.workloads import Dense
from pserver import Arrays, Job


class Variables(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Holds the trained variables. Its output is 0, with the gradient ``1e-6 * v + 1e-9`` for each
    variable: a real one would cost a pass over the variables that the peers do not make either."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.values = [
            self.add_weight(shape=dense.shape, initializer="zeros", name=f"variable_{i}")
            for i in range(dense.count)
        ]
        self.built = True

    def call(self, _x: tf.Tensor) -> tf.Tensor:
        """A scalar."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def zero(*values: tf.Tensor) -> Any:
            def gradient(_upstream: tf.Tensor) -> list[tf.Tensor]:
                return [1e-6 * value + 1e-9 for value in values]

            return tf.constant(0.0), gradient

        return zero(*map(tf.convert_to_tensor, self.values))


def output(_y: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """As a loss."""
    return output


def dense_job(dense: Dense) -> Job:
    """One epoch of ``dense.steps`` batches without content; no checkpoint during it."""
    nothing = np.zeros((dense.steps, 1), np.float32)
    return Job(
        model=lambda: Variables(dense),
        loss=output,
        optimizer=keras.optimizers.SGD(1e-3),
        train=Arrays(nothing, nothing),
        batch_size=1,
        checkpoint_every=10**9,
        mode="async",
    )
