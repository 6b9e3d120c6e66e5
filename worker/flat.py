"""From flat parameters to flat gradients in one compiled call.

Per-variable work from Python costs more than the mathematics of a small model, so there is none:
the arenas enter as they came from the shards, are cut into variables inside the compiled function
but outside the gradient tape, and the gradients leave it joined in the order of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from psrpc.errors import InvalidJob
from psrpc.plan import Plan
from worker.data import Array, Batch
from worker.devices import Device


class GradientStep(Protocol):
    """What differs between a Keras model and a ``tf.Module``; called while TensorFlow traces."""

    def differentiate(
        self, values: Sequence[tf.Tensor], seeds: tf.Tensor, batch: Batch
    ) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        """Runs one training step on ``values``, the variables in the order of the plan.

        Args:
            seeds: int64 ``[seed generators, 2]``.

        Returns:
            The loss, a scalar, and for each variable of the plan its gradient if it is trainable,
            otherwise its new value; None for a state variable that the step leaves alone.
        """

    def loss(self, values: Sequence[tf.Tensor], batch: Batch) -> tuple[tf.Tensor, Any]:
        """The loss in inference and the model's outputs (None where there are none)."""


@dataclass(frozen=True)
class StepInput:
    """What one step is given: tensors on the step's device.

    Attributes:
        seeds: int64 ``[seed generators, 2]``, their states.
        batch: ``(x, y)`` or ``(x, y, sample_weight)``.
        signature: the structure, dtypes and shapes of ``batch``: what a trace is made for. Found
            when the input is made, ahead of the step.
    """

    seeds: tf.Tensor
    batch: Batch
    signature: object = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", _signature(self.batch))


@dataclass(frozen=True)
class StepResult:
    """What one step gives.

    Attributes:
        updates: arena name -> ``[length]`` in its dtype, contiguous, read-only: gradients of
            trainable arenas, new minus old value of state arenas. Views of TensorFlow's memory,
            maybe even of the parameters that the step was given.
        loss: mean over the batch, with the model's own losses.
        finite: no element of ``updates`` is NaN or infinite.
    """

    updates: Mapping[str, Array]
    loss: float
    finite: bool


class FlatStep:
    """The training step of one model on flat parameters. Not thread-safe.

    One trace for every batch shape, never a relaxed one: with other shapes TensorFlow may choose
    other kernels, and workers that saw batches in another order would get other bits.
    """

    def __init__(self, step: GradientStep, plan: Plan, device: Device) -> None:
        self._step = step
        self._plan = plan
        self._device = device
        self._function = tf.function(self._run)
        self._traces: dict[object, Callable[..., Any]] = {}

    def __call__(self, parameters: Sequence[tf.Tensor], given: StepInput) -> StepResult:
        """Computes the gradient of a batch at ``parameters``, per arena ``[length]``, on the host.

        Raises:
            Exception: whatever the model, its loss or TensorFlow raises.
        """
        arenas = self._device.receive(parameters)
        trace = self._traces.get(given.signature)
        if trace is None:
            trace = self._function.get_concrete_function(arenas, given.seeds, given.batch)
            self._traces[given.signature] = trace
        *updates, vitals = trace(arenas, given.seeds, given.batch)
        loss, power = memoryview(self._device.send(vitals))
        views = {
            arena.name: np.asarray(memoryview(self._device.send(update)))
            for arena, update in zip(self._plan.arenas, updates, strict=True)
        }
        # The sum of squares is one pass over memory; it overflows before its terms do, so only
        # when it is not finite is each element looked at.
        finite = math.isfinite(power) or all(
            bool(np.isfinite(view).all()) for view in views.values()
        )
        return StepResult(views, loss, finite)

    def _run(
        self, arenas: tuple[tf.Tensor, ...], seeds: tf.Tensor, batch: Batch
    ) -> tuple[tf.Tensor, ...]:
        # A traced function does not take over the scope that it is called in.
        with self._device.scope():
            return self._differentiate(arenas, seeds, batch)

    def _differentiate(
        self, arenas: tuple[tf.Tensor, ...], seeds: tf.Tensor, batch: Batch
    ) -> tuple[tf.Tensor, ...]:
        values = split_arenas(self._plan, arenas)
        loss, changes = self._step.differentiate(values, seeds, batch)
        if loss.shape.rank != 0:
            raise InvalidJob(f"the loss has shape {loss.shape}; expected a scalar")
        updates = []
        for arena in self._plan.arenas:
            parts = []
            for index in arena.order:
                change, value = changes[index], values[index]
                if arena.role == "state":
                    change = tf.zeros_like(value) if change is None else change - value
                elif change is None:
                    raise InvalidJob(
                        f"the loss does not depend on variable {self._plan.variables[index].name!r}"
                        " for this batch, but did when the job was described; let it always do so"
                    )
                # Embedding look-ups give sparse gradients; the arena is dense.
                parts.append(tf.reshape(tf.convert_to_tensor(change), [-1]))
            updates.append(tf.concat(parts, 0))
        power = tf.add_n([tf.cast(tf.nn.l2_loss(update), tf.float64) for update in updates])
        return (*updates, tf.stack([tf.cast(loss, tf.float64), power]))


def split_arenas(plan: Plan, arenas: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The variables of the plan, in its order and shapes, cut from whole arenas ``[length]``."""
    values: dict[int, tf.Tensor] = {}
    for arena, flat in zip(plan.arenas, arenas, strict=True):
        members = [plan.variables[index] for index in arena.order]
        parts = tf.split(flat, [variable.size for variable in members])
        for index, variable, part in zip(arena.order, members, parts, strict=True):
            values[index] = tf.reshape(part, variable.shape)
    return [values[index] for index in range(len(plan.variables))]


def _signature(nest: Any) -> object:
    if isinstance(nest, dict):
        return tuple((key, _signature(value)) for key, value in sorted(nest.items()))
    if isinstance(nest, list | tuple):
        return (type(nest), *map(_signature, nest))
    return (nest.dtype, tuple(nest.shape))
