"""The replacement of ``SpectralNormalization`` that docs/keras.md advises."""

from __future__ import annotations

from typing import Any

import keras


class SpectralDense(keras.layers.Layer):  # type: ignore[misc]
    """A dense layer that computes with its kernel divided by its largest singular value."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.u = self.add_weight(shape=(1, self.units), name="u", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        ops = keras.ops
        v = ops.normalize(ops.matmul(self.u, ops.transpose(self.kernel)))
        u = ops.normalize(ops.matmul(v, self.kernel))
        u, v = ops.stop_gradient(u), ops.stop_gradient(v)
        if training:
            self.u.assign(u)
        sigma = ops.sum(ops.matmul(v, self.kernel) * u)
        return ops.matmul(x, self.kernel / sigma)
