"""The step of a plain ``tf.Module``, as a function of its variables' values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from worker.data import Batch


class ModuleStep:
    """A module whose variables are given their values inside the compiled step."""

    def __init__(
        self,
        module: tf.Module,
        loss: Callable[..., Any],
        variables: Sequence[tf.Variable],
        trainable: Sequence[bool],
    ) -> None:
        """``loss`` is ``f(module, x, y[, sample_weight])``, the mean over the batch; ``variables``
        are in the order of the plan, ``trainable`` the same."""
        self._module = module
        self._loss = loss
        self._variables = variables
        self._trainable = trainable

    def differentiate(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,  # noqa: ARG002  # of the interface; a module has no seed generators
        batch: Batch,
    ) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        """See :class:`worker.flat.GradientStep`."""
        self._assign(values)
        watched = [v for v, train in zip(self._variables, self._trainable, strict=True) if train]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            loss = self._loss(self._module, *batch)
        gradients = iter(tape.gradient(loss, watched))
        return loss, [
            next(gradients) if train else variable.read_value()
            for variable, train in zip(self._variables, self._trainable, strict=True)
        ]

    def loss(self, values: Sequence[tf.Tensor], batch: Batch) -> tuple[tf.Tensor, None]:
        """See :class:`worker.flat.GradientStep`."""
        self._assign(values)
        return self._loss(self._module, *batch), None

    def _assign(self, values: Sequence[tf.Tensor]) -> None:
        # Where a value is a view of the received parameters, an assignment may alias it; the
        # variables are read within this step only, so later writes there do no harm.
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)
