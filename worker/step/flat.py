"""From flat parameters to the shards' parts of a gradient in one compiled call.

Per-variable work from Python costs more than the mathematics of a small model, so there is none:
the arenas enter as they came from the shards, are cut into variables inside the compiled function
but outside the gradient tape, and the gradients leave it in a few buffers, see
``worker.step.layout``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import tensorflow as tf

from psrpc.core.encoding import Encoding, Gradient
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.ops.logs import get_logger
from worker.data.source import Array, Batch
from worker.embedding.id_finder import FoundIds, row_gradients, table_specs
from worker.embedding.lookups import FetchedRows
from worker.embedding.row_sets import RowSums, not_finite
from worker.embedding.rows import RowsNeeded
from worker.runtime.devices import Device
from worker.runtime.trace import TRACING, Trace
from worker.step.arenas import (
    GradientStep,
    batch_signature,
    encoded,
    is_finite,
    power_of,
    split_arenas,
    with_states,
)
from worker.step.layout import Compressor, Layout, Span

log = get_logger()


@dataclass(frozen=True)
class StepInput:
    """What one step is given: tensors on the step's device.

    Attributes:
        seeds: int64 ``[seed generators, 2]``, their states.
        batch: ``(x, y)`` or ``(x, y, sample_weight)``, ragged tensors among them.
        ids: what it asks of embedding tables; None where there are none.
        places: of each call of a layer, as in ``ids``, but tensors.
        orders: of each table, the same; none on the host.
        tensors: all of them, flat, ragged ones as values and row splits.
        signature: the structure, dtypes and shapes of ``batch``: what a trace is made for. These
            two are found when the input is made, ahead of the step.
    """

    seeds: tf.Tensor
    batch: Batch
    ids: FoundIds | None = None
    places: Sequence[tf.Tensor] = ()
    orders: Sequence[tf.Tensor] = ()
    tensors: Sequence[tf.Tensor] = field(init=False)
    signature: object = field(init=False)

    def __post_init__(self) -> None:
        flat = tf.nest.flatten((self.seeds, self.batch), expand_composites=True)
        object.__setattr__(self, "tensors", [*flat, *self.places, *self.orders])
        object.__setattr__(self, "signature", batch_signature(self.batch))

    @property
    def needed(self) -> RowsNeeded | None:
        """The rows that it needs; None where there are no tables."""
        return None if self.ids is None else self.ids.needed


@dataclass(frozen=True)
class StepResult:
    """What one step gives.

    Attributes:
        gradients: what each shard gets, in the order of the plan: gradients of trainable arenas,
            new minus old value of state arenas, the new value of replaced ones. Read-only views
            of TensorFlow's memory, maybe even of the parameters that the step was given. Empty if
            not finite.
        loss: mean over the batch, with the model's own losses.
        finite: no element of the gradients is NaN or infinite, as it travels.
        rows: what each shard gets for the rows of embedding tables, by the index of the table:
            their gradients. Empty if not finite, or without tables. Good until the next step.
        metrics: the variables of the job's metrics after this batch alone, flat.
    """

    gradients: tuple[Gradient, ...]
    loss: float
    finite: bool
    rows: tuple[Mapping[int, Rows], ...] = ()
    metrics: tuple[float, ...] = ()


class FlatStep:
    """The training step of one model on flat parameters. Not thread-safe.

    One trace for every batch shape, never a relaxed one: with other shapes TensorFlow may choose
    other kernels, and workers that saw batches in another order would get other bits. Shapes are
    few: a batch and the last of an epoch, and where micro-batches are cut by the speed of workers,
    multiples of an eighth of ``batch_size``, of which a round of K has no more than 8 K. How many
    values a ragged tensor and how many rows an embedding table has differs from batch to batch, and
    that alone is relaxed, from the first trace on. Rows are only gathered from, and their gradient
    is summed up in the order of the batch: on a device as part of the step, since that makes less
    of it to be sent; on the host by :class:`worker.embedding.row_sets.RowSums`, where the shards
    read it."""

    def __init__(
        self,
        step: GradientStep,
        plan: Plan,
        device: Device,
        wire: Encoding = "plain",
        compressor: Compressor | None = None,
    ) -> None:
        """``wire`` is ``plain``, ``bfloat16`` or ``float16``: how the gradients of encodable arenas
        leave the step, unless ``compressor`` takes them, and in what form parameters may come."""
        self._step = step
        self._plan = plan
        self._device = device
        self._compressor = compressor
        self._layout = Layout(plan, "plain" if compressor else wire)
        self._function = tf.function(self._run)
        self._traces: dict[object, Trace] = {}
        self._sums = RowSums(plan.tables)

    def __call__(
        self,
        parameters: Sequence[tf.Tensor],
        given: StepInput,
        rows: Sequence[tf.Tensor] = (),
        sums: RowSums | None = None,
    ) -> StepResult:
        """Computes the gradient of a batch at ``parameters``, per arena ``[length]``, on the host.

        Args:
            rows: of each table the rows that ``given`` needs, float32 ``[at least 1, width]``, on
                the host.
            sums: where the gradients of rows are summed up on the host; None is memory of its own.

        Raises:
            Exception: whatever the model, its loss or TensorFlow raises.
        """
        arenas = self._device.receive(parameters)
        rows = self._device.receive(rows)
        trace = self._traces.get(given.signature)
        if trace is None:
            with TRACING:
                self._traces[given.signature] = trace = self._trace(arenas, given)
        outputs = map(self._device.send, trace((*arenas, *given.tensors, *rows)))
        *buffers, vitals = [np.asarray(memoryview(output)) for output in outputs]
        loss, power, *metrics = vitals.tolist()
        result = self._result(given, buffers, loss, power, sums)
        return replace(result, metrics=tuple(metrics)) if metrics else result

    def compiled(self, given: StepInput) -> bool:
        """Whether the step has been compiled for batches of this shape."""
        return given.signature in self._traces

    def _result(
        self,
        given: StepInput,
        buffers: list[Array],
        loss: float,
        power: float,
        sums: RowSums | None,
    ) -> StepResult:
        dense = len(self._layout.spans)
        buffers, changes = buffers[:dense], buffers[dense:]
        if given.ids is None:
            return step_result(self._layout, self._compressor, buffers, loss, power)
        if given.orders:
            result = step_result(self._layout, self._compressor, buffers, loss, power, changes)
            if not result.finite:
                self._tell_not_finite(given.ids, changes, by_row=True)
            parts: Sequence[Mapping[int, Rows]]
            parts = given.ids.needed.split(changes, self._plan.shards)
        else:
            summed = (sums or self._sums).sum(given.ids.needed, given.ids.orders, changes)
            if summed is None:
                self._tell_not_finite(given.ids, changes)
                return StepResult((), float(loss), False)
            result = step_result(self._layout, self._compressor, buffers, loss, power)
            parts = summed
        return replace(result, rows=tuple(parts)) if result.finite else result

    def _tell_not_finite(
        self, ids: FoundIds, changes: Sequence[Array], by_row: bool = False
    ) -> None:
        found = not_finite(ids.needed, () if by_row else ids.orders, changes)
        if found is not None:
            table, id_ = found
            name = self._plan.tables[table].name
            log.warning("the gradient of a row is NaN or infinite", table=name, id=id_)

    def _trace(self, arenas: tuple[tf.Tensor, ...], given: StepInput) -> Trace:
        if given.ids is None:
            return Trace(self._function.get_concrete_function(arenas, given.seeds, given.batch))
        calls = given.ids.calls

        def run(
            arenas: tuple[tf.Tensor, ...],
            seeds: tf.Tensor,
            batch: Batch,
            places: tuple[tf.Tensor, ...],
            orders: tuple[tf.Tensor, ...],
            rows: tuple[tf.Tensor, ...],
        ) -> tuple[tf.Tensor, ...]:
            with self._device.scope():
                tables = FetchedRows(rows, calls, places, orders)
                return self._differentiate(arenas, seeds, batch, tables)

        concrete = tf.function(run).get_concrete_function(
            arenas, given.seeds, given.batch, *table_specs(self._plan, given.ids, given.orders)
        )
        return Trace(concrete)

    def _run(
        self, arenas: tuple[tf.Tensor, ...], seeds: tf.Tensor, batch: Batch
    ) -> tuple[tf.Tensor, ...]:
        # A traced function does not take over the scope that it is called in.
        with self._device.scope():
            return self._differentiate(arenas, seeds, batch, None)

    def _differentiate(
        self,
        arenas: tuple[tf.Tensor, ...],
        seeds: tf.Tensor,
        batch: Batch,
        tables: FetchedRows | None,
    ) -> tuple[tf.Tensor, ...]:
        # Only the user's code may need AutoGraph. It takes its time for each call in a loop.
        plain = tf.autograph.experimental.do_not_convert
        values = plain(split_arenas)(self._plan, arenas)
        loss, changes = self._step.differentiate(values, seeds, batch, tables)
        if loss.shape.rank != 0:
            raise InvalidJob(f"the loss has shape {loss.shape}; expected a scalar")
        spans = self._layout.spans
        buffers = [plain(self._buffer)(span, values, changes) for span in spans]
        floats = [b for span, b in zip(spans, buffers, strict=True) if not span.arena.replaced]
        rows = []
        if tables is not None:
            rows = row_gradients(self._plan, tables, changes[len(values) :])
        # What is summed up on the host is looked at there.
        vital = [*floats, *rows] if tables is not None and tables.orders else floats
        vitals = with_states([tf.cast(loss, tf.float64), power_of(vital)], self._step)
        return (*encoded(spans, buffers), *rows, vitals)

    def _buffer(
        self, span: Span, values: Sequence[tf.Tensor], changes: Sequence[tf.Tensor | None]
    ) -> tf.Tensor:
        """What the step says of the variables of ``span``, in one flat tensor."""
        parts = []
        for index in span.variables:
            change, value = changes[index], values[index]
            if span.arena.replaced:
                change = value if change is None else tf.cast(change, span.arena.dtype)
            elif span.arena.role == "state":
                change = tf.zeros_like(value) if change is None else change - value
            elif change is None:
                raise InvalidJob(
                    f"the loss does not depend on variable {self._plan.variables[index].name!r}"
                    " for this batch, but did when the job was described; let it always do so"
                )
            # Embedding look-ups give sparse gradients; the arena is dense.
            parts.append(tf.reshape(tf.convert_to_tensor(change), [-1]))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def step_result(
    layout: Layout,
    compressor: Compressor | None,
    buffers: Sequence[Array],
    loss: float,
    power: float,
    rows: Sequence[Array] = (),
) -> StepResult:
    """What leaves a step: ``buffers``, as :func:`encoded` made them, cut for the shards.

    Args:
        power: :func:`power_of` the buffers before that, and of ``rows``.
        rows: what else must be finite.
    """
    # A sum of squares that is finite has finite terms, but not the other way round.
    if not math.isfinite(power) and not (
        all(map(is_finite, layout.spans, buffers)) and all(np.isfinite(r).all() for r in rows)
    ):
        return StepResult((), float(loss), False)
    gradients = layout.cut(buffers)
    if compressor is not None:
        gradients = compressor.compress(gradients)
    return StepResult(gradients, float(loss), bool(gradients))
