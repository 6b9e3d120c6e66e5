"""The step of a Keras model, as a function of its variables' values."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from psrpc.core.errors import InvalidJob
from worker.data.source import Batch
from worker.embedding.lookups import FetchedRows, LookUps, look_up
from worker.model.build import layer_metrics, loss_trackers
from worker.model.loss_scale import divided, finite
from worker.model.placement import where_the_forward_pass_ran
from worker.model.training_metrics import TrainingMetrics
from worker.model.variables import derived
from worker.step.step_graph import compiled_apart

_Attempted = tuple[
    tf.Tensor, Sequence[tf.Tensor | None], tuple[Sequence[tf.Tensor | None], Sequence[tf.Tensor]]
]


class KerasStep:
    """A built Keras model that computes with given values and never changes its own variables."""

    def __init__(
        self,
        model: keras.Model,
        loss: Callable[..., tf.Tensor],
        variables: Sequence[keras.Variable],
        trainable: Sequence[bool],
        seeds: Sequence[keras.Variable],
        metrics: TrainingMetrics | None = None,
        scale: float | None = None,
    ) -> None:
        """``loss`` comes from ``worker.model.build.build_loss``; ``variables`` and ``trainable``
        are in plan order; ``seeds`` are the states of the model's seed generators, in model order;
        ``metrics`` are updated with each gradient; for ``scale`` see
        :mod:`worker.model.loss_scale`."""
        self._model = model
        self._loss = loss
        self._variables = variables
        self._trainable = trainable
        self._seeds = seeds
        self._metrics = metrics
        self._scale = scale
        self.counted: Sequence[tf.Tensor] = ()
        """See :class:`worker.step.arenas.GradientStep`."""
        self._takes_training = "training" in inspect.signature(model.call).parameters

    def differentiate(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Batch,
        tables: FetchedRows | None = None,
    ) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        """See :class:`worker.step.arenas.GradientStep`."""
        if self._scale is None:
            loss, gradients, (states, counted) = self._attempt(values, seeds, batch, tables, None)
        else:

            def attempt(scale: tf.Tensor) -> _Attempted:
                # Each attempt needs its own copy, which counts the calls of layers.
                own = None if tables is None else replace(tables)
                return self._attempt(values, seeds, batch, own, scale)

            loss, gradients, (states, counted) = finite(attempt, self._scale)
        self.counted = counted
        remaining = iter(gradients)
        changes = [
            next(remaining) if train else state
            for state, train in zip(states, self._trainable, strict=True)
        ]
        return loss, [*changes, *remaining]

    def _attempt(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Batch,
        tables: FetchedRows | None,
        scale: tf.Tensor | None,
    ) -> _Attempted:
        """Returns the loss, the gradients of trainable variables and rows, and for each variable
        its new value if it is state, with the metrics' counts."""
        rows = [] if tables is None else tables.rows
        watched = [*[v for v, train in zip(values, self._trainable, strict=True) if train], *rows]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            loss, outputs, scope = self._call(values, seeds, batch, tables, training=True)
            if scale is not None:
                # A custom loss may be float16.
                loss = tf.cast(loss, tf.float32)
        # Custom gradients read variables too, so they need the same scope.
        with scope, derived(self._model), where_the_forward_pass_ran():
            gradients = tape.gradient(loss, watched, output_gradients=scale)
        self._check_assigned(scope.assigned)
        for variable in scope.apart:
            raise compiled_apart(variable)
        if scale is not None:
            gradients = [divided(gradient, scale) for gradient in gradients]
        counted: Sequence[tf.Tensor] = ()
        if self._metrics is not None:
            # Compute metrics after the gradients: in parallel, they would have to wake other
            # threads, which costs more.
            last = next((g for g in gradients if isinstance(g, tf.Tensor)), loss)
            with tf.control_dependencies([last]):
                counted = self._metrics.states(batch, outputs, scope)
        states = [
            None if train else scope.get_current_value(variable)
            for variable, train in zip(self._variables, self._trainable, strict=True)
        ]
        return loss, gradients, (states, counted)

    def loss(
        self, values: Sequence[tf.Tensor], batch: Batch, tables: LookUps | None = None
    ) -> tuple[tf.Tensor, Any]:
        """See :class:`worker.step.arenas.GradientStep`. Also updates the means of the losses of
        several outputs, and the metrics of layers."""
        seeds = tf.zeros([len(self._seeds), 2], tf.int64)
        loss, outputs, scope = self._call(values, seeds, batch, tables, training=False)
        for metric in [*loss_trackers(self._model), *layer_metrics(self._model)]:
            for variable in metric.variables:
                value = scope.get_current_value(variable)
                if value is not None:
                    variable.assign(value)
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
        """See :class:`worker.embedding.id_finder.Model`."""
        self._call(values, seeds, batch, tables, training=training)

    def handles(self) -> Sequence[tf.Tensor]:
        """See :class:`worker.embedding.id_finder.Model`; empty, since a run reads no variable."""
        return ()

    def _call(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Batch,
        tables: LookUps | None,
        *,
        training: bool,
    ) -> tuple[tf.Tensor, Any, _Scope]:
        counting = training and self._metrics is not None
        trackers = self._metrics.trackers() if counting and self._metrics else []
        mapping = [
            *((variable, tf.zeros(variable.shape, variable.dtype)) for variable in trackers),
            *zip(self._variables, values, strict=True),
            *zip(self._seeds, tf.unstack(seeds, num=len(self._seeds)), strict=True),
        ]
        # Like ``stateless_call``, but through ``__call__``, which casts inputs to the model's dtype
        # as ``fit`` does.
        with (
            _Scope(mapping, collect_losses=True) as scope,
            derived(self._model),
            look_up(tables),
            python_draws_alike(),
        ):
            arguments = {"training": training} if self._takes_training else {}
            outputs = self._model(batch[0], **arguments)
            loss = self._loss(batch, outputs, training)
        return loss, outputs, scope

    def _check_assigned(self, assigned: Iterable[keras.Variable]) -> None:
        """Raises InvalidJob, with a remedy, for an assignment that a training step would lose."""
        pairs = zip(self._variables, self._trainable, strict=True)
        trained = {id(variable) for variable, train in pairs if train}
        known = {*map(id, self._variables), *map(id, self._seeds)}
        known |= {id(variable) for variable in self._model.metrics_variables}
        for variable in assigned:
            if id(variable) in trained:
                raise InvalidJob(
                    f"the forward pass assigns the trainable variable {variable.path!r}, which "
                    "the optimizer on the shards updates; let it compute with a value derived from "
                    "the variable, or use a constraint (keras.constraints)",
                    code="PS108",
                )
            if id(variable) not in known:
                raise InvalidJob(
                    f"the forward pass assigns variable {variable.path!r}, which is not the "
                    "model's, so no shard keeps it; make it a weight of a layer. Random numbers "
                    "come from a keras.random.SeedGenerator that is an attribute of a layer",
                    code="PS108",
                )


class _Scope(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types
    """Remembers which variables were assigned, and which were read while TensorFlow compiled
    another function than the one that entered the scope."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.assigned: list[keras.Variable] = []
        self.apart: list[keras.Variable] = []
        self._function = _function()

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Called by Keras for a variable's value."""
        if self._function is not None and _function() is not self._function:
            self.apart.append(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Called by Keras in place of an assignment."""
        self.assigned.append(update[0])
        super().add_update(update)


def _function() -> tf.Graph | None:
    """Returns the graph of the function being compiled, not of its branches; None outside."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


@contextmanager
def python_draws_alike() -> Iterator[None]:
    """Makes Python's ``random`` draw the same in each process within the block. Layers such as
    ``AugMix`` use it while TensorFlow traces them, so workers would otherwise compute differently.
    """
    before = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(before)
