"""Computes the shards' parts of a gradient from flat parameters in one compiled call.

Per-variable work in Python costs more than the mathematics of a small model. So arenas enter the
compiled function as the shards sent them; it cuts them into variables outside the gradient tape,
and returns the gradients in a few buffers, see ``worker.step.layout``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import tensorflow as tf

from psrpc.core.encoding import Encoding
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Plan
from psrpc.core.tables import Rows
from psrpc.ops.logs import get_logger
from worker.data.source import Array, Batch
from worker.embedding.id_finder import FoundIds, row_gradients, table_specs, without_gradient
from worker.embedding.lookups import FetchedRows
from worker.embedding.row_sets import RowSums, not_finite
from worker.embedding.rows import RowsNeeded
from worker.model.placement import check_placed
from worker.runtime.devices import Device
from worker.runtime.trace import TRACING, Trace, graph_function
from worker.step.arenas import (
    DeviceResult,
    GradientStep,
    StepResult,
    batch_signature,
    encoded,
    host_arrays,
    power_of,
    split_arenas,
    step_result,
    with_states,
)
from worker.step.layout import ArenaSpan, Compressor, Layout

log = get_logger()


@dataclass(frozen=True)
class StepInput:
    """The input of one step: tensors on the step's device.

    Attributes:
        seeds: int64 ``[seed generators, 2]``, their states.
        batch: ``(x, y)`` or ``(x, y, sample_weight)``; may contain ragged tensors.
        ids: the ids that the batch looks up in embedding tables; None without tables.
        places: the ``places`` of ``ids`` as tensors, one per call of a layer.
        orders: the ``orders`` of ``ids`` as tensors, one per table; empty on the host.
        tensors: all tensors of the input in a flat list; ragged ones as values and row splits.
        signature: the structure, dtypes and shapes of ``batch``, the key of a trace. Computed with
            the input, like ``tensors``, to save that time in the step.
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
        """The rows that the batch needs; None without tables."""
        return None if self.ids is None else self.ids.needed


class FlatStep:
    """The training step of one model on flat parameters. Not thread-safe.

    Each batch shape has a trace of its own, never one that also fits other shapes: in such a trace
    TensorFlow may choose other kernels, and workers that saw batches in another order would compute
    other bits. There are few shapes: a batch and the last of an epoch and, where micro-batch sizes
    follow worker speed, multiples of an eighth of ``batch_size``, at most 8 K in a round of K. Only
    the number of ragged values and table rows, which differs from batch to batch, is left open from
    the first trace on.

    The step only gathers rows. Their gradients are summed in batch order: on an accelerator within
    the step, so that it sends less to the host; otherwise by
    :class:`worker.embedding.row_sets.RowSums`, into memory that the shards read."""

    def __init__(
        self,
        step: GradientStep,
        plan: Plan,
        device: Device,
        wire: Encoding = "plain",
        compressor: Compressor | None = None,
        *,
        soft_placement: bool = False,
    ) -> None:
        """``wire`` (``plain``, ``bfloat16`` or ``float16``) encodes gradients of encodable arenas,
        unless ``compressor`` does; parameters may also arrive in it. Without ``soft_placement`` all
        of the worker's devices must be used, and no others."""
        self._step = step
        self._plan = plan
        self._device = device
        self._compressor = compressor
        self._soft_placement = soft_placement
        self._layout = Layout(plan, "plain" if compressor else wire)
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
            rows: per table the rows that ``given`` needs, float32 ``[at least 1, width]``, on the
                host.
            sums: where the host sums row gradients; by default in memory of this object.

        Raises:
            Exception: any error of the model, its loss or TensorFlow.
        """
        outputs = self._run(parameters, given, rows)
        *buffers, vitals = host_arrays(map(self._device.send, outputs))
        loss, power, *metrics = vitals.tolist()
        result = self._result(given, buffers, loss, power, sums)
        return replace(result, metrics=tuple(metrics)) if metrics else result

    def on_device(self, parameters: Sequence[tf.Tensor], given: StepInput) -> DeviceResult:
        """As a call, but leaves the gradient on the device. Not for a model with tables, nor with a
        compressor."""
        *buffers, vitals = self._run(parameters, given)
        (scalars,) = host_arrays([self._device.send(vitals)])
        return DeviceResult(self._layout, self._device, buffers, scalars.tolist())

    def _run(
        self, parameters: Sequence[tf.Tensor], given: StepInput, rows: Sequence[tf.Tensor] = ()
    ) -> list[tf.Tensor]:
        """Returns what :meth:`_outputs` made, on the device."""
        arenas = self._device.receive(parameters)
        rows = self._device.receive(rows)
        trace = self._traces.get(given.signature)
        if trace is None:
            with TRACING:
                self._traces[given.signature] = trace = self._trace(arenas, given)
        # Else the call itself would be on the first device: its arguments and results would pass
        # through there. A model over several devices has them on the host.
        with nullcontext() if self._device.others else self._device.scope():
            return trace((*arenas, *given.tensors, *rows))

    def compiled(self, given: StepInput) -> bool:
        """Whether the step is already compiled for this batch shape."""
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
                self._log_not_finite(given.ids, changes, by_row=True)
            parts: Sequence[Mapping[int, Rows]]
            parts = given.ids.needed.split(changes, self._plan.shards)
        else:
            summed = (sums or self._sums).sum(given.ids.needed, given.ids.orders, changes)
            if summed is None:
                self._log_not_finite(given.ids, changes)
                return StepResult((), float(loss), False)
            result = step_result(self._layout, self._compressor, buffers, loss, power)
            parts = summed
        return replace(result, rows=tuple(parts)) if result.finite else result

    def _log_not_finite(
        self, ids: FoundIds, changes: Sequence[Array], by_row: bool = False
    ) -> None:
        found = not_finite(ids.needed, () if by_row else ids.orders, changes)
        if found is not None:
            table, id_ = found
            name = self._plan.tables[table].name
            log.warning("the gradient of a row is NaN or infinite", table=name, id=id_)

    def _trace(self, arenas: tuple[tf.Tensor, ...], given: StepInput) -> Trace:
        calls = None if given.ids is None else given.ids.calls

        def run(
            arenas: tuple[tf.Tensor, ...],
            seeds: tf.Tensor,
            batch: Batch,
            places: tuple[tf.Tensor, ...],
            orders: tuple[tf.Tensor, ...],
            rows: tuple[tf.Tensor, ...],
        ) -> tuple[tf.Tensor, ...]:
            # A traced function does not inherit the caller's scope.
            with self._device.scope():
                tables = None if calls is None else FetchedRows(rows, calls, places, orders)
                return self._differentiate(arenas, seeds, batch, tables)

        concrete = graph_function(run).get_concrete_function(
            arenas, given.seeds, given.batch, *table_specs(self._plan, given.ids, given.orders)
        )
        check_placed(concrete.graph, self._device, soft=self._soft_placement)
        return Trace(concrete)

    def _differentiate(
        self,
        arenas: tuple[tf.Tensor, ...],
        seeds: tf.Tensor,
        batch: Batch,
        tables: FetchedRows | None,
    ) -> tuple[tf.Tensor, ...]:
        with self._device.edge():
            values = split_arenas(self._plan, arenas)
        loss, changes = self._step.differentiate(values, seeds, batch, tables)
        if loss.shape.rank != 0:
            raise InvalidJob(f"the loss has shape {loss.shape}; expected a scalar")
        with self._device.edge():
            return self._outputs(values, loss, changes, tables)

    def _outputs(
        self,
        values: Sequence[tf.Tensor],
        loss: tf.Tensor,
        changes: Sequence[tf.Tensor | None],
        tables: FetchedRows | None,
    ) -> tuple[tf.Tensor, ...]:
        spans = self._layout.spans
        buffers = [self._buffer(span, values, changes) for span in spans]
        floats = [b for span, b in zip(spans, buffers, strict=True) if not span.arena.replaced]
        rows = []
        if tables is not None:
            rows = row_gradients(self._plan, tables, changes[len(values) :])
        # The host checks the row gradients that it sums.
        vital = [*floats, *rows] if tables is not None and tables.orders else floats
        vitals = with_states([tf.cast(loss, tf.float64), power_of(vital)], self._step)
        return (*encoded(spans, buffers), *rows, vitals)

    def _buffer(
        self, span: ArenaSpan, values: Sequence[tf.Tensor], changes: Sequence[tf.Tensor | None]
    ) -> tf.Tensor:
        """Returns the gradients or new values of the variables of ``span`` in one flat tensor."""
        parts = []
        for index in span.variables:
            change, value = changes[index], values[index]
            if span.arena.replaced:
                change = value if change is None else tf.cast(change, span.arena.dtype)
            elif span.arena.role == "state":
                change = tf.zeros_like(value) if change is None else change - value
            elif change is None:
                raise without_gradient(f"variable {self._plan.variables[index].name!r}")
            # Embedding look-ups give sparse gradients; the arena is dense.
            parts.append(tf.reshape(tf.convert_to_tensor(change), [-1]))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)
