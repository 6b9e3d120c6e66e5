"""Finds a batch's ids for embedding tables, ahead of the step that needs their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Plan, VariableSpec
from worker.data.source import Batch, map_arrays
from worker.embedding.lookups import FetchedRows, LookUpCall, LookUps, NoRows
from worker.embedding.rows import ByRow, Call, Places, RowsNeeded, find_rows
from worker.embedding.table_options import TableOptions, same_tables, tables_of
from worker.runtime.devices import HOST
from worker.runtime.trace import TRACING, Trace


class Model(Protocol):
    """A model as a function of its variables' values; called while TensorFlow traces."""

    def run(
        self,
        values: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        batch: Batch,
        tables: LookUps,
        *,
        training: bool,
    ) -> object:
        """Runs the model once with ``values``, so that its layers query ``tables``."""

    def handles(self) -> Sequence[tf.Tensor]:
        """Returns the resources of variables that a run reads instead of ``values``."""


@dataclass(frozen=True)
class IdsTrace:
    """Finds the ids of batches of one signature.

    Attributes:
        tables: each once, as the layers name them, in the order of the calls.
        calls: the calls of layers in order. Their indices of tables are places in ``tables``, or,
            within an :class:`IdFinder`, in the plan's tables.
        shapes: the shape of each call's ids; None for dimensions that differ between batches.
        find: returns the ids of each call for the flattened tensors of ``(seeds, batch)``.
    """

    tables: tuple[TableOptions, ...]
    calls: tuple[Call, ...]
    shapes: tuple[tf.TensorShape, ...]
    find: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


@dataclass(frozen=True, eq=False)
class FoundIds:
    """The rows that a batch needs, and the place of each call's ids among them.

    Attributes:
        places: per call the place of each id, int32, in the shape of the ids.
        orders: per table its ids by row, see :class:`worker.embedding.rows.ByRow`.
    """

    needed: RowsNeeded
    calls: tuple[Call, ...]
    shapes: tuple[tf.TensorShape, ...]
    places: tuple[Places, ...]
    orders: tuple[ByRow, ...]


class IdFinder:
    """Runs a model's graph up to its Embedding layers, on the CPU. Thread-safe.

    It traces the model once per batch signature, with rows of zeros, and cuts off the operations
    that do not lead to ids.
    """

    def __init__(self, model: Model, plan: Plan, *, training: bool = True) -> None:
        """``training`` is passed to the model."""
        self._model = model
        self._plan = plan
        self._training = training
        self._traces: dict[object, IdsTrace] = {}

    def __call__(self, seeds: tf.Tensor, batch: Batch, signature: object) -> FoundIds:
        """Returns the rows that ``batch`` needs; tensors are on the host.

        Args:
            seeds: int64 ``[seed generators, 2]``.
            signature: the structure, dtypes and shapes of ``batch``.

        Raises:
            InvalidJob: the ids depend on parameters or rows, or are not in their table.
        """
        trace = self._traces.get(signature)
        if trace is None:
            with TRACING:
                trace = trace_ids(
                    self._model, self._plan.variables, seeds, batch, training=self._training
                )
            self._traces[signature] = trace = self._of_plan(trace)
        with tf.device(HOST):
            ids = trace.find(tf.nest.flatten((seeds, batch), expand_composites=True))
        found = [np.asarray(memoryview(each)) for each in ids]
        needed, places, orders = find_rows(
            self._plan.tables, trace.calls, found, self._plan.row_shards
        )
        needed = needed.with_slices(self._plan.slices)
        return FoundIds(needed, trace.calls, trace.shapes, places, orders)

    def _of_plan(self, trace: IdsTrace) -> IdsTrace:
        """Returns ``trace`` with tables by their index in the plan."""
        planned = {table.name: index for index, table in enumerate(self._plan.tables)}
        calls = []
        for call in trace.calls:
            name = trace.tables[call.table].name
            if name not in planned:
                raise InvalidJob(
                    f"layer {call.rule.layer!r} looks table {name!r} up, but did not when the job "
                    "was described; a model must call the same layers in training, for each batch"
                )
            calls.append(Call(planned[name], call.rule))
        used = {trace.tables[call.table].name for call in trace.calls}
        planned_tables = [table for table in self._plan.tables if table.name in used]
        if different := same_tables(trace.tables, planned_tables):
            raise InvalidJob(f"this model differs from the job's description: {different}")
        return IdsTrace(trace.tables, tuple(calls), trace.shapes, trace.find)


def trace_ids(
    model: Model,
    variables: Sequence[VariableSpec],
    seeds: tf.Tensor,
    batch: Batch,
    *,
    training: bool = True,
) -> IdsTrace:
    """Traces ``model`` for batches like ``batch``. The indices in calls are places in ``tables`` of
    the result.

    Raises:
        InvalidJob: ids depend on parameters or rows, a layer is called in a loop (names the
            layer), or layers disagree on their table.
    """
    asked: list[LookUpCall] = []

    def run(
        values: list[tf.Tensor], taint: tf.Tensor, seeds: tf.Tensor, batch: Batch
    ) -> list[tf.Tensor]:
        source = NoRows(taint)
        model.run(values, seeds, batch, source, training=training)
        for each in source.asked:
            if each.ids.graph is not tf.compat.v1.get_default_graph():
                raise InvalidJob(
                    f"layer {each.rule.layer!r} is called inside of a loop or a condition; its "
                    "ids must be known before the step runs"
                )
        asked.extend(source.asked)
        # Copies, because a graph cannot both feed and fetch a tensor.
        return [tf.identity(each.ids) for each in asked]

    specs = (
        [tf.TensorSpec(spec.shape, spec.dtype) for spec in variables],
        tf.TensorSpec([], tf.float32),
        tf.TensorSpec(seeds.shape, seeds.dtype),
        map_arrays(tf.type_spec_from_value, batch),
    )
    flat = tf.nest.flatten(specs, expand_composites=True)

    def flat_run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return run(*tf.nest.pack_sequence_as(specs, list(tensors), expand_composites=True))

    with tf.device(HOST):
        whole = tf.compat.v1.wrap_function(flat_run, flat)
    hidden = len(variables) + 1
    given = list(whole.inputs[: len(flat)])
    # By identity: two tensors may be equal.
    names = {id(tensor): index for index, tensor in enumerate(given)}
    read = _captured(whole, model.handles())
    needed: set[int] = set()
    for each in asked:
        sources = _sources(each.ids)
        indices = {names[source] for source in sources if source in names}
        if sources & read or any(index < hidden for index in indices):
            raise InvalidJob(
                f"the ids of layer {each.rule.layer!r} depend on parameters, or on rows of a "
                "table; they must follow from the batch alone, since their rows are fetched before "
                "the step runs"
            )
        needed |= indices
    feeds = sorted(needed)
    tables = tables_of(each.table for each in asked)
    index_of = {table.name: index for index, table in enumerate(tables)}
    return IdsTrace(
        tuple(tables),
        tuple(Call(index_of[each.table.name], each.rule) for each in asked),
        tuple(each.ids.shape for each in asked),
        _pruned(whole, given, feeds, hidden) if asked else lambda _tensors: [],
    )


def _pruned(
    whole: Any, given: Sequence[tf.Tensor], feeds: Sequence[int], hidden: int
) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
    """Cuts ``whole`` down to the path from the inputs ``feeds`` to ids."""
    trace = Trace(whole.prune([given[index] for index in feeds], list(whole.outputs)))

    def find(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return trace([tensors[index - hidden] for index in feeds])

    return find


def _captured(whole: Any, handles: Sequence[tf.Tensor]) -> set[int]:
    """Returns the inputs of ``whole`` that stand for ``handles``, by identity."""
    theirs = {id(handle) for handle in handles}
    return {id(inner) for outer, inner in whole.graph.captures if id(outer) in theirs}


def _sources(tensor: tf.Tensor) -> set[int]:
    """Returns the placeholders that ``tensor`` is computed from, by identity."""
    found: set[int] = set()
    seen, todo = set(), [tensor]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if each.op.type == "Placeholder":
            found.add(id(each))
        todo.extend(each.op.inputs)
    return found


def table_specs(
    plan: Plan, ids: FoundIds | None, orders: Sequence[tf.Tensor] = ()
) -> tuple[tuple[tf.TensorSpec, ...], ...]:
    """Returns the specs of tensors that a step takes: the places of each call, the ``orders``, and
    the rows of each table. All are empty without ``ids``."""
    if ids is None:
        return (), (), ()
    return (
        tuple(tf.TensorSpec(shape, tf.int32) for shape in ids.shapes),
        tuple(tf.TensorSpec([None], tf.int32) for _ in orders),
        tuple(tf.TensorSpec([None, table.width], tf.float32) for table in plan.tables),
    )


def row_gradients(plan: Plan, tables: FetchedRows, changes: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the gradients of each table's rows, float32: one per row if ``tables`` has orders,
    else one per id of the batch."""
    gradients = []
    for index, (table, change) in enumerate(zip(plan.tables, changes, strict=True)):
        if change is None:
            raise without_gradient(f"table {table.name!r}")
        assert isinstance(change, tf.IndexedSlices)  # the gradient of one gather
        if not tables.orders:
            gradients.append(tf.convert_to_tensor(change.values))
            continue
        # One thread sums in a fixed order; this is also faster than summing unsorted gradients with
        # several threads.
        order = tables.orders[index]
        places = tf.gather(change.indices, order)
        gradients.append(tf.math.segment_sum(tf.gather(change.values, order), places))
    return gradients


def without_gradient(what: str) -> InvalidJob:
    """Returns the error for a variable or table that a batch gives no gradient."""
    return InvalidJob(
        f"the loss does not depend on {what} for this batch, but did when the job was described; "
        "let it always do so"
    )
