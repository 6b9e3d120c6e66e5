"""A compiled function that costs little to call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_CONFIG = tf.compat.v1.ConfigProto(allow_soft_placement=True).SerializeToString()
"""As TensorFlow itself calls its functions: what has no GPU kernel runs on the CPU."""

TRACING = threading.RLock()
"""Held while a model is traced: two threads do it, the trainer's and the one that reads ahead, and
a Keras model is not made for both at once."""


class Trace:
    """One trace of a ``tf.function``, for tensors of fixed dtypes and shapes.

    What ``tf.function`` does for a call in Python (binding, checks, tapes) takes longer than a
    small step. None of it is needed here.
    """

    def __init__(self, concrete: Any) -> None:
        """``concrete`` is a ``tf.types.experimental.ConcreteFunction`` that returns a flat sequence
        of tensors."""
        self._concrete = concrete
        self._dtypes = [output.dtype for output in concrete.outputs]

    def __call__(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """``inputs`` are the function's arguments as ``tf.nest.flatten`` gives them, of ragged
        tensors the components."""
        captured = self._concrete.captured_inputs
        try:
            outputs: list[tf.Tensor] = tf.raw_ops.StatefulPartitionedCall(
                args=[*inputs, *captured], Tout=self._dtypes, f=self._concrete, config_proto=_CONFIG
            )
        except tf.errors.OpError:
            # Called in its own way, a function also says which line of the user's code it was.
            flat, _ = self._concrete.structured_input_signature
            arguments = tf.nest.pack_sequence_as(flat, list(inputs), expand_composites=True)
            outputs = list(self._concrete(*arguments))
        return outputs
