"""``keras.Model.fit`` written out for one process: what a ``fit`` on a cluster is compared with.

Hooks come in the order of Keras's own trainer (``keras/src/backend/tensorflow/trainer.py``), and
batches in that of the job. Gradients come from ``tf.GradientTape`` on the model's own variables.
SGD with momentum is written out in NumPy; other optimizers are Keras's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from psrpc.core.batch import BatchId
from worker.fit.training_logs import build_as_fit
from worker.stored.arguments import training_data
from worker.stored.stored_data import open_stored, store

Update = Callable[[Any, Sequence[Any]], None]


def sgd_in_numpy(model: Any, gradients: Sequence[Any]) -> None:
    """One update of SGD with momentum, on the variables of the model's optimizer."""
    optimizer = model.optimizer
    rate, momentum = (np.float32(each) for each in (optimizer.learning_rate, optimizer.momentum))
    for variable, velocity, gradient in zip(
        model.trainable_variables, optimizer.momentums, gradients, strict=True
    ):
        velocity.assign(momentum * velocity.numpy() - rate * gradient.numpy())
        variable.assign(variable.numpy() + velocity.numpy())
    optimizer.iterations.assign_add(1)


def by_keras(model: Any, gradients: Sequence[Any]) -> None:
    """One update of the model's optimizer."""
    model.optimizer.apply(gradients, model.trainable_variables)


def fit(
    folder: Path,
    model: Any,
    x: Any,
    y: Any,
    *,
    seed: int,
    update: Update,
    batch_size: int,
    epochs: int = 1,
    callbacks: Sequence[Any] = (),
    initial_epoch: int = 0,
    validation_data: Any = None,
    validation_freq: int = 1,
) -> Any:
    """Trains ``model`` as ``keras.Model.fit``; validates on one batch.

    Args:
        folder: for the data, as the job stores it.
        seed: the job's, which gives the order of records.
        update: one of the above.
    """
    data, _ = training_data(x, y, batch_size=batch_size)
    stored = store(folder, data)
    source = open_stored(folder, stored)
    build_as_fit(model, source.read_range(0, 1))
    model.optimizer.build(model.trainable_variables)
    hooks = keras.callbacks.CallbackList(
        list(callbacks),
        add_history=True,
        verbose=0,
        epochs=epochs,
        steps=stored["steps"],
        model=model,
    )

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=outputs, training=True)
        return loss, outputs, tape.gradient(loss, model.trainable_variables)

    model.stop_training = False
    hooks.on_train_begin()
    logs: dict[str, float] | None = None
    first = model._initial_epoch or initial_epoch
    for epoch in range(first, epochs):
        model.reset_metrics()
        hooks.on_epoch_begin(epoch)
        totals = Totals(model)
        for index in range(stored["steps"]):
            hooks.on_train_batch_begin(index)
            start = index * batch_size
            count = min(batch_size, stored["records"] - start)
            x, y = source.read(seed, BatchId(epoch - first, start, count))
            loss, outputs, gradients = step(x, y)
            finite = all(np.isfinite(gradient).all() for gradient in gradients)
            if finite:
                update(model, gradients)
            logs = totals.add(float(loss) if finite else math.nan, count, y, outputs)
            hooks.on_train_batch_end(index, logs)
            if model.stop_training:
                break
        assert logs is not None
        if validation_data is not None and (epoch + 1) % validation_freq == 0:
            hooks.on_test_begin()
            model.reset_metrics()
            hooks.on_test_batch_begin(0)
            results = model.test_on_batch(*validation_data, return_dict=True)
            hooks.on_test_batch_end(0, results)
            hooks.on_test_end(results)
            logs = {**logs, **{f"val_{name}": value for name, value in results.items()}}
        hooks.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    model.optimizer.finalize_variable_values(model.trainable_weights)
    hooks.on_train_end(logs=logs)
    return model.history


class Totals:
    """The loss and the states of metrics, each batch by itself, summed in float64."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._loss, self._records = 0.0, 0
        self._finite = True
        self._states = [0.0 for _ in model._compile_metrics.variables]

    def add(self, loss: float, count: int, y: Any, outputs: Any) -> dict[str, float]:
        """Returns the results of the epoch so far."""
        metrics = self._model._compile_metrics
        metrics.reset_state()
        if math.isfinite(loss):
            metrics.update_state(y, outputs)
            self._loss += loss * count
            self._records += count
        self._finite = self._finite and math.isfinite(loss)
        for place, variable in enumerate(metrics.variables):
            self._states[place] += float(variable.numpy())
            variable.assign(self._states[place])
        mean = self._loss / self._records if self._finite else math.nan
        return {**metrics.result(), "loss": mean}
