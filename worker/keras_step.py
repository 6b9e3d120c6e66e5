"""The step of a Keras model, as a function of its variables' values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from worker.build import loss_trackers
from worker.data import Batch
from worker.lookups import FetchedRows, LookUps, look_up


class KerasStep:
    """A built Keras model that computes with given values and leaves its own variables alone."""

    def __init__(
        self,
        model: keras.Model,
        loss: Callable[..., tf.Tensor],
        variables: Sequence[keras.Variable],
        trainable: Sequence[bool],
        seeds: Sequence[keras.Variable],
    ) -> None:
        """``loss`` is ``worker.build.build_loss``'s; ``variables`` are in the order of the plan,
        ``trainable`` the same; ``seeds`` are the states of the model's seed generators, in model
        order."""
        self._model = model
        self._loss = loss
        self._variables = variables
        self._trainable = trainable
        self._seeds = seeds
        self._takes_training = "training" in inspect.signature(model.call).parameters

    def differentiate(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Batch,
        tables: FetchedRows | None = None,
    ) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        """See :class:`worker.flat.GradientStep`."""
        rows = [] if tables is None else tables.rows
        watched = [*[v for v, train in zip(values, self._trainable, strict=True) if train], *rows]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            loss, _, scope = self._call(values, seeds, batch, tables, training=True)
        gradients = iter(tape.gradient(loss, watched))
        changes = [
            next(gradients) if train else scope.get_current_value(variable)
            for variable, train in zip(self._variables, self._trainable, strict=True)
        ]
        return loss, [*changes, *gradients]

    def loss(
        self, values: Sequence[tf.Tensor], batch: Batch, tables: LookUps | None = None
    ) -> tuple[tf.Tensor, Any]:
        """See :class:`worker.flat.GradientStep`. Counts the losses of several outputs."""
        seeds = tf.zeros([len(self._seeds), 2], tf.int64)
        loss, outputs, scope = self._call(values, seeds, batch, tables, training=False)
        for tracker in loss_trackers(self._model):
            for variable in tracker.variables:
                variable.assign(scope.get_current_value(variable))
        return loss, outputs

    def run(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Batch,
        tables: LookUps,
        *,
        training: bool,
    ) -> None:
        """See :class:`worker.id_finder.Model`."""
        self._call(values, seeds, batch, tables, training=training)

    def handles(self) -> Sequence[tf.Tensor]:
        """See :class:`worker.id_finder.Model`; a run reads no variable."""
        return ()

    def _call(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Batch,
        tables: LookUps | None,
        *,
        training: bool,
    ) -> tuple[tf.Tensor, Any, keras.StatelessScope]:
        mapping = [
            *zip(self._variables, values, strict=True),
            *zip(self._seeds, tf.unstack(seeds, num=len(self._seeds)), strict=True),
        ]
        # Like ``stateless_call``, but through the model's ``__call__``, which casts inputs to the
        # model's dtype as ``fit`` does.
        with keras.StatelessScope(mapping, collect_losses=True) as scope, look_up(tables):
            arguments = {"training": training} if self._takes_training else {}
            outputs = self._model(batch[0], **arguments)
            loss = self._loss(batch, outputs, training)
        return loss, outputs, scope
