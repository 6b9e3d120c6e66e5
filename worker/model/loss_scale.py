"""Loss scaling for models that compute in float16.

Gradients below 6e-8 are 0 in float16. So the backward pass begins with a scale instead of 1, and
the worker divides the gradients, float32 like the variables, by it (Micikevicius et al. 2018,
"Mixed Precision Training"). Keras's ``LossScaleOptimizer`` adapts the scale over many steps. Here
every batch begins with the same scale, and repeats with a smaller one while its gradients are not
finite, so that its result depends neither on earlier batches nor on the worker. Scales are powers
of two, which change exponents alone and so cause no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from psrpc.core.errors import InvalidJob

SCALE = 2.0**15
"""The first scale of a batch, as in Keras."""

SHRINK = 1 / 16
"""Factor of the scale from one attempt to the next."""

ATTEMPTS = 6
"""Attempts per batch. The last scale is 2**-5; beyond it the gradients themselves overflow."""

_GROWTH_STEPS = 2000

Attempt = Callable[[tf.Tensor], tuple[tf.Tensor, Sequence[Any], Any]]
"""Takes a scale, a float32 scalar; returns the loss, the gradients without the scale (None if
missing), and a nest of other results of the step."""


def computes_in_float16(model: Any) -> bool:
    """Whether a layer of a Keras model computes in float16, as with ``mixed_float16``."""
    return isinstance(model, keras.Model) and any(
        getattr(layer, "compute_dtype", None) == "float16" for layer in model._flatten_layers()
    )


def loss_scale(optimizer: Any, model: Any) -> float | None:
    """Returns the first scale of batches; None if no layer needs one."""
    return initial_scale(optimizer) if computes_in_float16(model) else None


def initial_scale(optimizer: Any) -> float:
    """Returns the initial scale of an optimizer; 2**15 if it has none."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return SCALE
    return float(optimizer.initial_scale)


def inner(optimizer: Any) -> Any:
    """Unwraps a ``LossScaleOptimizer``, as ``compile`` makes one for a ``mixed_float16`` model;
    returns other optimizers as they are.

    Raises:
        InvalidJob: it sets the growth of the scale, which workers do not support.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    if optimizer.dynamic_growth_steps != _GROWTH_STEPS:
        raise InvalidJob(
            f"LossScaleOptimizer has dynamic_growth_steps={optimizer.dynamic_growth_steps}, but "
            "every batch begins with initial_scale; leave it out",
            code="PS108",
        )
    return optimizer.inner_optimizer


def finite(attempt: Attempt, scale: float) -> tuple[tf.Tensor, Sequence[Any], Any]:
    """Calls ``attempt`` with ever smaller scales, and returns the first result with finite
    gradients. If there is none, returns that of the smallest scale; if the loss is not finite, no
    scale helps, and it returns the result with that loss. Called while TensorFlow traces."""
    first = attempt(tf.constant(scale))
    smallest = scale * SHRINK ** (ATTEMPTS - 1)

    def flat(result: Any) -> list[tf.Tensor]:
        parts = tf.nest.flatten(result, expand_composites=True)
        return [part for part in parts if part is not None]

    def again(at: tf.Tensor, retry: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
        return tf.logical_and(retry, at > smallest)

    def smaller(at: tf.Tensor, _: tf.Tensor, *__: tf.Tensor) -> list[tf.Tensor]:
        at = at * SHRINK
        result = attempt(at)
        return [at, _overflowed(result), *flat(result)]

    begin = [tf.constant(scale), _overflowed(first), *flat(first)]
    _, _, *found = tf.while_loop(again, smaller, begin, parallel_iterations=1)
    rest = iter(found)
    filled = [
        None if part is None else next(rest)
        for part in tf.nest.flatten(first, expand_composites=True)
    ]
    result: tuple[tf.Tensor, Sequence[Any], Any]
    result = tf.nest.pack_sequence_as(first, filled, expand_composites=True)
    return result


def _overflowed(result: tuple[tf.Tensor, Sequence[Any], Any]) -> tf.Tensor:
    """Whether a smaller scale may help: the loss is finite, but a gradient is not."""
    loss, gradients, _ = result
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    powers = [tf.cast(tf.nn.l2_loss(value), tf.float64) for value in values if value is not None]
    all_finite = tf.math.is_finite(tf.add_n(powers)) if powers else tf.constant(True)
    return tf.logical_and(tf.math.is_finite(loss), tf.logical_not(all_finite))


def divided(gradient: Any, scale: tf.Tensor) -> Any:
    """Divides a gradient of the scaled loss, dense or sparse, by the scale."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            divided(gradient.values, scale), gradient.indices, gradient.dense_shape
        )
    return gradient / tf.cast(scale, gradient.dtype)
