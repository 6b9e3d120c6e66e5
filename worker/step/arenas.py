"""Cuts, scales and encodes gradients as flat arenas; the results of steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from psrpc.core.encoding import LARGEST, Encoding, Gradient, wire_dtype
from psrpc.core.plan import ALIGNMENT_BYTES, Plan
from psrpc.core.tables import Rows
from worker.data.source import Array, Batch
from worker.embedding.lookups import FetchedRows, LookUps
from worker.runtime.devices import Device
from worker.step.layout import ArenaSpan, Compressor, Layout


def split_arenas(plan: Plan, arenas: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Cuts arenas ``[length]`` into the plan's variables, in its order, shapes and dtypes. Arenas
    may be rounded: float16, or bfloat16 stored as uint16."""
    values: dict[int, tf.Tensor] = {}
    for arena, flat in zip(plan.arenas, arenas, strict=True):
        if flat.dtype == tf.uint16:
            flat = tf.bitcast(flat, tf.bfloat16)
        flat = tf.cast(flat, arena.dtype)
        pieces = _cut(flat, [plan.variables[index].size for index in arena.order])
        for index, piece in zip(arena.order, pieces, strict=True):
            values[index] = tf.reshape(piece, plan.variables[index].shape)
    return [values[index] for index in range(len(plan.variables))]


def _cut(flat: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Cuts ``flat`` into pieces of ``sizes``. Pieces whose start and end are aligned are views; as
    far as possible they come first in an arena.

    One split cuts all aligned pieces: hundreds of slices cost more than the mathematics of a small
    model, and each adds four operations to compile. A split with an unaligned piece copies all its
    pieces, so a second split cuts the rest.
    """
    unit = ALIGNMENT_BYTES // flat.dtype.size
    aligned = list(itertools.takewhile(lambda size: size % unit == 0, sizes))
    start = sum(aligned)
    pieces = tf.split(flat[:start], aligned) if aligned else []
    others = sizes[len(aligned) :]
    return [*pieces, *(tf.split(flat[start:], others) if others else ())]


def power_of(buffers: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns half the sum of squares as float64, which is finite only if all ``buffers`` are. One
    pass over memory, cheaper than a check of each element."""
    powers = [tf.cast(tf.nn.l2_loss(buffer), tf.float64) for buffer in buffers]
    return tf.add_n(powers) if powers else tf.zeros([], tf.float64)


def with_states(scalars: Sequence[tf.Tensor], step: GradientStep) -> tf.Tensor:
    """Returns float64 ``scalars`` followed by ``step.counted``, in one flat tensor."""
    stacked = tf.stack(scalars)
    if not step.counted:
        return stacked
    # Cast once per dtype: every operation costs as much as many elements.
    flat = [tf.reshape(state, [-1]) for state in step.counted]
    if len({state.dtype for state in flat}) > 1:
        flat = [tf.cast(state, tf.float64) for state in flat]
    return tf.concat([stacked, tf.cast(tf.concat(flat, 0), tf.float64)], 0)


def encoded(spans: Sequence[ArenaSpan], buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Encodes the buffers of ``spans`` for the wire."""
    return [_encode(b, s.encoding) for s, b in zip(spans, buffers, strict=True)]


def plain_buffers(spans: Sequence[ArenaSpan], buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the elements of buffers that :func:`encoded` made, rounded ones as float32."""
    return [
        b if s.encoding == "plain" else tf.cast(tf.bitcast(b, s.encoding), tf.float32)
        for s, b in zip(spans, buffers, strict=True)
    ]


def is_finite_span(span: ArenaSpan, buffer: Array) -> bool:
    """Whether every element of an encoded buffer is finite."""
    if span.encoding == "float16":
        # Clipping has replaced infinite elements by the largest number. Finite gradients of norm
        # 1e19, which are also refused here, are as useless as infinite ones.
        return False
    elements = buffer.view(wire_dtype(span.encoding, buffer.dtype))
    return bool(np.isfinite(elements).all())


def _encode(buffer: tf.Tensor, encoding: Encoding) -> tf.Tensor:
    """Encodes ``buffer`` for the wire; NumPy sees rounded elements as uint16."""
    if encoding == "plain":
        return buffer
    if encoding == "float16":
        buffer = tf.clip_by_value(buffer, -LARGEST["float16"], LARGEST["float16"])
    return tf.bitcast(tf.cast(buffer, encoding), tf.uint16)


def batch_signature(nest: Any) -> object:
    """Returns the structure, dtypes and shapes of a batch of tensors, hashable."""
    if isinstance(nest, dict):
        return tuple((key, batch_signature(value)) for key, value in sorted(nest.items()))
    if isinstance(nest, list | tuple):
        return (type(nest), *map(batch_signature, nest))
    return (nest.dtype, tuple(nest.shape))


class GradientStep(Protocol):
    """The interface of Keras and ``tf.Module`` steps; called while TensorFlow traces."""

    @property
    def counted(self) -> Sequence[tf.Tensor]:
        """The variables of the job's metrics after the last :meth:`differentiate` batch alone,
        additive over batches; empty if none are counted."""

    def differentiate(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Batch,
        tables: FetchedRows | None = None,
    ) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        """Runs one training step on ``values``, the variables in the order of the plan.

        Args:
            seeds: int64 ``[seed generators, 2]``.
            tables: the rows of embedding tables, if there are any.

        Returns:
            The loss, a scalar, and for each variable of the plan its gradient if it is trainable,
            otherwise its new value; None for a state variable that the step leaves alone. Then
            the gradient of the rows of each table.
        """

    def loss(
        self, values: Sequence[tf.Tensor], batch: Batch, tables: LookUps | None = None
    ) -> tuple[tf.Tensor, Any]:
        """Returns the inference loss and the model's outputs (None if it has none)."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        gradients: per shard, in plan order: gradients of trainable arenas, new minus old value of
            state arenas, the new value of replaced ones. Read-only views of TensorFlow's memory,
            possibly of the step's parameters. Empty if not finite.
        loss: mean over the batch, with the model's own losses.
        finite: whether no element of the encoded gradients is NaN or infinite.
        rows: per shard, by table index, gradients of table rows. Empty if not finite or without
            tables. Valid until the next step.
        metrics: the variables of the job's metrics after this batch alone, flat.
    """

    gradients: tuple[Gradient, ...]
    loss: float
    finite: bool
    rows: tuple[Mapping[int, Rows], ...] = ()
    metrics: tuple[float, ...] = ()


class DeviceResult:
    """The result of one step whose gradient stays on the device that computed it, until
    :attr:`gradients` is read. Without table rows."""

    rows: Sequence[Mapping[int, Rows]] = ()

    def __init__(
        self, layout: Layout, device: Device, buffers: Sequence[tf.Tensor], vitals: Sequence[float]
    ) -> None:
        """``buffers`` are on ``device``, one for each span of ``layout``, encoded; ``vitals`` are
        the loss, :func:`power_of` the buffers, and the metrics' variables."""
        self.buffers = buffers
        self.loss, self._power, *self.metrics = vitals
        self._layout = layout
        self._device = device

    @property
    def finite(self) -> bool:
        """See StepResult."""
        # Not a finite power alone says no, see :func:`step_result`.
        return math.isfinite(self._power) or self._on_host.finite

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """See StepResult."""
        return self._on_host.gradients

    @cached_property
    def _on_host(self) -> StepResult:
        buffers = host_arrays(map(self._device.send, self.buffers))
        return step_result(self._layout, None, buffers, self.loss, self._power)


def host_arrays(tensors: Iterable[tf.Tensor]) -> list[Array]:
    """Returns read-only views of tensors of the host."""
    return [np.asarray(memoryview(tensor)) for tensor in tensors]


def step_result(
    layout: Layout,
    compressor: Compressor | None,
    buffers: Sequence[Array],
    loss: float,
    power: float,
    rows: Sequence[Array] = (),
) -> StepResult:
    """Makes the result from ``buffers``, as :func:`encoded` returned them.

    Args:
        power: :func:`power_of` the buffers before encoding and of ``rows``.
        rows: row gradients, which must be finite too.
    """
    # A finite sum of squares implies finite terms, but not vice versa.
    if not math.isfinite(power) and not (
        all(map(is_finite_span, layout.spans, buffers)) and all(np.isfinite(r).all() for r in rows)
    ):
        return StepResult((), float(loss), False)
    gradients = layout.cut(buffers)
    if compressor is not None:
        gradients = compressor.compress(gradients)
    return StepResult(gradients, float(loss), bool(gradients))
