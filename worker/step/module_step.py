"""The step of a plain ``tf.Module``, as a function of its variables' values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

from worker.data.source import Batch
from worker.embedding.lookups import FetchedRows, LookUps, look_up
from worker.model.placement import where_the_forward_pass_ran


class ModuleStep:
    """A module whose variables receive their values inside the compiled step."""

    counted: Sequence[tf.Tensor] = ()
    """See :class:`worker.step.arenas.GradientStep`; a module has no metrics."""

    def __init__(
        self,
        module: tf.Module,
        loss: Callable[..., Any],
        variables: Sequence[tf.Variable],
        trainable: Sequence[bool],
    ) -> None:
        """``loss`` is ``f(module, x, y[, sample_weight])``, the mean over the batch; ``variables``
        and ``trainable`` are in plan order."""
        self._module = module
        self._loss = _converted(loss)
        self._variables = variables
        self._trainable = trainable

    def differentiate(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,  # noqa: ARG002  # of the interface; modules have no seed generators
        batch: Batch,
        tables: FetchedRows | None = None,
    ) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        """See :class:`worker.step.arenas.GradientStep`."""
        self._assign(values)
        trained = [v for v, train in zip(self._variables, self._trainable, strict=True) if train]
        watched = [*trained, *([] if tables is None else tables.rows)]
        with tf.GradientTape(watch_accessed_variables=False) as tape, look_up(tables):
            tape.watch(watched)
            loss = self._loss(self._module, *batch)
        with where_the_forward_pass_ran():
            gradients = iter(tape.gradient(loss, watched))
        changes = [
            next(gradients) if train else variable.read_value()
            for variable, train in zip(self._variables, self._trainable, strict=True)
        ]
        return loss, [*changes, *gradients]

    def loss(
        self, values: Sequence[tf.Tensor], batch: Batch, tables: LookUps | None = None
    ) -> tuple[tf.Tensor, None]:
        """See :class:`worker.step.arenas.GradientStep`."""
        self._assign(values)
        with look_up(tables):
            return self._loss(self._module, *batch), None

    def run(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,  # noqa: ARG002  # as above
        batch: Batch,
        tables: LookUps,
        *,
        training: bool,  # noqa: ARG002  # as above
    ) -> None:
        """See :class:`worker.embedding.id_finder.Model`."""
        self._assign(values)
        with look_up(tables):
            self._loss(self._module, *batch)

    def handles(self) -> Sequence[tf.Tensor]:
        """See :class:`worker.embedding.id_finder.Model`."""
        return [variable.handle for variable in self._variables]

    def _assign(self, values: Sequence[tf.Tensor]) -> None:
        # An assignment may alias the received parameters. Only this step reads the variables, so
        # later writes there do no harm.
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))


def _converted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``loss``, to be converted by AutoGraph when it is called: it may contain conditions
    and loops over tensors, as in a ``tf.function`` of the user's own."""
    context = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)
    converted: Callable[..., Any] = tf.__internal__.autograph.tf_convert(loss, context)
    return converted
