"""Updates a job's metrics on training data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from psrpc.core.batch import LOSS, MAX_VALUES
from psrpc.ops.logs import get_logger
from worker.data.source import Batch
from worker.job.job import Job
from worker.model.build import layer_metrics, loss_trackers
from worker.model.metrics import build_metrics, counted_by, naming_metric

log = get_logger()


class TrainingMetrics:
    """Updates the job's metrics with the outputs of the training step, as ``keras.Model.fit`` does,
    but separately for every batch: the states of all batches can be added up.

    The states have the order of those of an evaluation: the losses of several outputs, metrics of
    layers, then the job's. Used while TensorFlow traces; not thread-safe.
    """

    def __init__(self, job: Job, model: Any) -> None:
        self._job = job
        self._model = model
        self._metrics: list[Any] | None = None
        self._initial: list[list[Any]] = []

    def trackers(self) -> list[Any]:
        """Returns the variables that computing the loss updates: the losses of several outputs, and
        metrics of layers."""
        own = [*loss_trackers(self._model), *layer_metrics(self._model)]
        return [variable for metric in own for variable in metric.variables]

    def states(self, batch: Batch, outputs: Any, scope: keras.StatelessScope) -> list[tf.Tensor]:
        """Returns the variables of all metrics after ``batch`` alone; an empty list if they are too
        large.

        Args:
            scope: the scope that computed the loss, with :meth:`trackers` at 0.

        Raises:
            UserCodeFailed: a metric raised; the message names it.
        """
        if self._metrics is None:
            # Makes variables outside of the traced graph, and of the function that is traced: one
            # that makes variables is traced twice.
            with tf.init_scope(), tf.variable_creator_scope(_as_outside):
                self._make(batch[1], outputs)
        assert self._metrics is not None
        states = [scope.get_current_value(variable) for variable in self.trackers()]
        for metric, initial in zip(self._metrics, self._initial, strict=True):
            with naming_metric(self._job, self._model, metric, batch[1], outputs):
                states += metric.stateless_update_state(
                    [tf.constant(value) for value in initial],
                    *counted_by(metric, self._model, batch, outputs),
                )
        return states if self._fits(states) else []

    def _fits(self, states: Sequence[Any]) -> bool:
        count = LOSS + sum(int(np.prod(state.shape)) for state in states)
        if count > MAX_VALUES:
            log.warning(
                "no metrics of training data: their variables are too large",
                values=count,
                expected=f"at most {MAX_VALUES}",
            )
        return count <= MAX_VALUES

    def _make(self, y_true: Any, y_pred: Any) -> None:
        """Makes the metrics; shows them data of the right shape, without which some have no
        variables."""
        y_true, y_pred = _zeros(y_true, y_pred)
        self._metrics = build_metrics(self._job, self._model, y_true, y_pred)
        for metric in self._metrics:
            with naming_metric(self._job, self._model, metric, y_true, y_pred):
                metric.update_state(y_true, y_pred)
            metric.reset_state()
            self._initial.append([variable.numpy() for variable in metric.variables])


def _as_outside(create: Callable[..., Any], **options: Any) -> Any:
    """Makes a variable that does not count as one of the ``tf.function`` that is being traced."""
    return create(**options | {"experimental_enable_variable_lifting": False})


def _zeros(y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Returns labels and outputs of 0 in the same structures and shapes. A dimension that is
    unknown while tracing, such as the records of a ``TextVectorization``, is taken from the other
    array if it is known there, or is 1."""
    labels, outputs = tf.nest.flatten(y_true), tf.nest.flatten(y_pred)
    known = [each.shape[0] for each in (*labels, *outputs) if each.shape.rank]
    records = next((extent for extent in known if extent is not None), 1)
    paired = len(labels) == len(outputs)

    def zeros(each: Any, others: Sequence[Any], place: int) -> tf.Tensor:
        other = list(others[place].shape) if paired and others[place].shape.rank else []
        own = other if each.shape.rank is None else list(each.shape)
        spare = [records, *other[1:], *[None] * len(own)]
        found = [a if b is None else b for a, b in zip(spare, own, strict=False)]
        return tf.zeros([1 if extent is None else extent for extent in found], each.dtype)

    return (
        tf.nest.pack_sequence_as(y_true, [zeros(e, outputs, i) for i, e in enumerate(labels)]),
        tf.nest.pack_sequence_as(y_pred, [zeros(e, labels, i) for i, e in enumerate(outputs)]),
    )
