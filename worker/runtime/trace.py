"""A compiled function that costs little to call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_CONFIG = tf.compat.v1.ConfigProto(allow_soft_placement=True).SerializeToString()
"""TensorFlow's own setting for functions: operations without a GPU kernel run on the CPU."""

TRACING = threading.RLock()
"""Held while tracing a model: the trainer's thread and the read-ahead thread both trace, and a
Keras model is not safe for two at once."""


def graph_function(function: Callable[..., Any]) -> Any:
    """Returns ``tf.function(function)`` without AutoGraph.

    Converting our own code takes a second before the first step. Keras converts no code of a model
    either; ``worker.step.module_step`` converts the loss of a ``tf.Module``.
    """
    return tf.function(function, autograph=False)


class Trace:
    """One trace of a ``tf.function``, for tensors of fixed dtypes and shapes.

    The Python part of a ``tf.function`` call (binding, checks, tapes) takes longer than a small
    step; this class skips it.
    """

    def __init__(self, concrete: Any) -> None:
        """``concrete`` is a ``tf.types.experimental.ConcreteFunction`` that returns a flat sequence
        of tensors."""
        self._concrete = concrete
        self._dtypes = [output.dtype for output in concrete.outputs]

    def __call__(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the function. ``inputs`` are its arguments as ``tf.nest.flatten`` gives them, ragged
        tensors as components."""
        captured = self._concrete.captured_inputs
        try:
            outputs: list[tf.Tensor] = tf.raw_ops.StatefulPartitionedCall(
                args=[*inputs, *captured], Tout=self._dtypes, f=self._concrete, config_proto=_CONFIG
            )
        except tf.errors.OpError:
            # The error of a normal call also names the line of the user's code.
            flat, _ = self._concrete.structured_input_signature
            arguments = tf.nest.pack_sequence_as(flat, list(inputs), expand_composites=True)
            outputs = list(self._concrete(*arguments))
        return outputs
