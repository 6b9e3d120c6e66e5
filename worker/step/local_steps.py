"""Takes several local steps and pushes them as one difference of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import ArenaPlan, Plan
from worker.data.source import Batch
from worker.embedding.id_finder import without_gradient
from worker.model.placement import check_placed
from worker.runtime.devices import Device
from worker.runtime.trace import Trace, graph_function
from worker.step.arenas import (
    GradientStep,
    StepResult,
    encoded,
    host_arrays,
    power_of,
    split_arenas,
    step_result,
    with_states,
)
from worker.step.flat import StepInput
from worker.step.layout import MOST_JOINED, Compressor, Layout
from worker.step.local_sgd import LocalSgd


@dataclass(frozen=True)
class LocalInput:
    """The input of the local steps of one batch.

    Attributes:
        parts: the input of each step, in order.
        counts: the number of records of each step.
    """

    parts: tuple[StepInput, ...]
    counts: tuple[int, ...]


def sub_batches(batch: BatchId, batch_size: int) -> list[BatchId]:
    """Splits ``batch`` into pieces of ``batch_size`` records; the last may be shorter."""
    stop = batch.first + batch.count
    return [
        BatchId(batch.epoch, first, min(batch_size, stop - first))
        for first in range(batch.first, stop, batch_size)
    ]


class LocalReader:
    """Reads the batches of local steps. As thread-safe as ``read``."""

    def __init__(self, read: Callable[[BatchId], StepInput], batch_size: int) -> None:
        """``read`` is a ``worker.step.compute.BatchReader``; dropout masks depend on the piece."""
        self._read = read
        self._batch_size = batch_size

    def __call__(self, batch: BatchId) -> LocalInput:
        """Returns the inputs of all steps. Raises InvalidJob if the data source fails."""
        pieces = sub_batches(batch, self._batch_size)
        return LocalInput(
            tuple(self._read(piece) for piece in pieces), tuple(piece.count for piece in pieces)
        )


class LocalSteps:
    """Local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1) on
    flat parameters. Not thread-safe.

    From the received parameters w₀ of version t, a worker takes one SGD step on each of the H
    pieces of its batch, the i-th with the schedule's learning rate for step t H + i; velocities
    start at 0. It pushes w₀ − w_H like a gradient. The shards, whose optimizer is SGD with learning
    rate 1, subtract it: the mean over a round, or each as it arrives (Geo-SGD). State, such as the
    moving averages of BatchNormalization, also passes from step to step and is pushed as the
    difference.

    H = 1 without momentum equals a step of the shards' own SGD. Shards apply constraints of
    variables after every push, not after every local step. Each step is one compiled call, and so
    is the difference. Nothing carries over between batches, so every worker computes the same bits
    for an attempt of a batch.
    """

    def __init__(
        self,
        step: GradientStep,
        plan: Plan,
        device: Device,
        sgd: LocalSgd,
        local_steps: int,
        wire: Encoding = "plain",
        compressor: Compressor | None = None,
        *,
        soft_placement: bool = False,
    ) -> None:
        """``local_steps`` is H; for the others see :class:`worker.step.flat.FlatStep`."""
        self._step = step
        self._plan = plan
        self._device = device
        self._sgd = sgd
        self._local_steps = local_steps
        self._compressor = compressor
        self._soft_placement = soft_placement
        # One buffer per arena, since each arena's values are contiguous already.
        outgoing: Encoding = "plain" if compressor else wire
        self._layout = Layout(plan, outgoing, alone_nbytes=sys.maxsize, most_joined=sys.maxsize)
        self._trainable = [arena for arena in plan.arenas if arena.role == "trainable"]
        self._advance = graph_function(self._advanced)
        self._traces: dict[object, Trace] = {}
        self._widen: Trace | None = None
        self._subtract: Trace | None = None
        self._resting: tuple[tf.Tensor, ...] | None = None

    def __call__(
        self, parameters: Sequence[tf.Tensor], given: LocalInput, version: int
    ) -> StepResult:
        """Takes a step for each part of ``given`` from ``parameters`` of ``version``, per arena
        ``[length]``, on the host. Raises any error of the model, its loss or TensorFlow."""
        first = values = self._begin(parameters)
        velocities = self._at_rest()
        scalars = []
        for index, part in enumerate(given.parts, start=version * self._local_steps):
            values, velocities, vitals = self._one(values, velocities, index, part)
            scalars.append(vitals)
        if self._subtract is None:
            subtract = graph_function(self._difference)
            self._subtract = Trace(subtract.get_concrete_function(first, values))
        outputs = self._subtract((*first, *values))
        *buffers, power = host_arrays(map(self._device.send, outputs))
        steps = host_arrays(map(self._device.send, scalars))
        means = [float(vitals[0]) for vitals in steps]
        mean = sum(m * n for m, n in zip(means, given.counts, strict=True)) / sum(given.counts)
        result = step_result(self._layout, self._compressor, buffers, mean, float(power))
        return replace(result, metrics=tuple(np.sum(steps, axis=0)[1:].tolist()))

    def compiled(self, given: LocalInput) -> bool:
        """Whether the step is already compiled for all these batch shapes."""
        return all(part.signature in self._traces for part in given.parts)

    # -- compiled calls -----------------------------------------------------------------------

    def _begin(self, parameters: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Returns the parameters on the device, each arena in its own dtype."""
        arenas = self._device.receive(parameters)
        if all(f.dtype == a.dtype for f, a in zip(arenas, self._plan.arenas, strict=True)):
            return arenas
        if self._widen is None:
            widen = graph_function(self._widened)
            self._widen = Trace(widen.get_concrete_function(arenas))
        return tuple(self._widen(arenas))

    def _one(
        self,
        values: tuple[tf.Tensor, ...],
        velocities: tuple[tf.Tensor, ...],
        index: int,
        part: StepInput,
    ) -> tuple[tuple[tf.Tensor, ...], tuple[tf.Tensor, ...], tf.Tensor]:
        with self._device.scope():
            number = tf.constant(index, tf.int64)
        trace = self._traces.get(part.signature)
        if trace is None:
            concrete = self._advance.get_concrete_function(
                values, velocities, number, part.seeds, part.batch
            )
            check_placed(concrete.graph, self._device, soft=self._soft_placement)
            self._traces[part.signature] = trace = Trace(concrete)
        *outputs, vitals = trace((*values, *velocities, number, *part.tensors))
        arenas = len(self._plan.arenas)
        return tuple(outputs[:arenas]), tuple(outputs[arenas:]), vitals

    def _at_rest(self) -> tuple[tf.Tensor, ...]:
        """Returns initial velocities: zeros, one tensor per arena of trained variables."""
        if self._resting is None:
            arenas = self._trainable if self._sgd.momentum else []
            with self._device.scope():
                self._resting = tuple(tf.zeros([arena.length], arena.dtype) for arena in arenas)
        return self._resting

    # -- functions to compile -----------------------------------------------------------------

    def _widened(self, arenas: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
        with self._device.scope():
            return tuple(
                tf.cast(
                    tf.bitcast(flat, tf.bfloat16) if flat.dtype == tf.uint16 else flat, arena.dtype
                )
                for arena, flat in zip(self._plan.arenas, arenas, strict=True)
            )

    def _advanced(
        self,
        arenas: tuple[tf.Tensor, ...],
        velocities: tuple[tf.Tensor, ...],
        index: tf.Tensor,
        seeds: tf.Tensor,
        batch: Batch,
    ) -> tuple[tf.Tensor, ...]:
        """Returns arenas and velocities after a step, and its loss and metrics."""
        with self._device.scope():
            values = split_arenas(self._plan, arenas)
            loss, changes = self._step.differentiate(values, seeds, batch)
            if loss.shape.rank != 0:
                raise InvalidJob(f"the loss has shape {loss.shape}; expected a scalar")
            rate = self._sgd.learning_rate(index)
            before = dict(zip([arena.name for arena in self._trainable], velocities, strict=False))
            after: list[tf.Tensor] = []
            moved: list[tf.Tensor] = []
            for arena, value in zip(self._plan.arenas, arenas, strict=True):
                change = self._joined(arena, values, changes)
                if arena.role == "state":
                    moved.append(change)
                    continue
                new, velocity = self._sgd.step(
                    value, before.get(arena.name), change, tf.cast(rate, arena.dtype)
                )
                moved.append(new)
                if velocity is not None:
                    after.append(velocity)
            return (*moved, *after, with_states([tf.cast(loss, tf.float64)], self._step))

    def _joined(
        self, arena: ArenaPlan, values: Sequence[tf.Tensor], changes: Sequence[tf.Tensor | None]
    ) -> tf.Tensor:
        """Returns gradients or new values of the variables of ``arena``, flat."""
        parts = []
        for index in arena.order:
            change = changes[index]
            if change is None:
                if arena.role == "trainable":
                    raise without_gradient(f"variable {self._plan.variables[index].name!r}")
                change = values[index]
            flat = tf.reshape(tf.convert_to_tensor(change), [-1])
            parts.append(tf.cast(flat, arena.dtype) if arena.replaced else flat)
        groups = [
            tf.concat(parts[at : at + MOST_JOINED], 0) for at in range(0, len(parts), MOST_JOINED)
        ]
        return groups[0] if len(groups) == 1 else tf.concat(groups, 0)

    def _difference(
        self, first: tuple[tf.Tensor, ...], last: tuple[tf.Tensor, ...]
    ) -> tuple[tf.Tensor, ...]:
        """Returns the buffer to push of each arena, and :func:`power_of` them."""
        with self._device.scope():
            arenas = self._plan.arenas
            buffers = [
                new if a.replaced else old - new if a.role == "trainable" else new - old
                for a, old, new in zip(arenas, first, last, strict=True)
            ]
            floats = [b for a, b in zip(arenas, buffers, strict=True) if not a.replaced]
            return (*encoded(self._layout.spans, buffers), power_of(floats))
