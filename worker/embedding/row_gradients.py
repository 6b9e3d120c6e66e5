"""The part of a compiled step that has to do with the rows of embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from psrpc.core.errors import InvalidJob
from psrpc.core.plan import Plan
from worker.embedding.id_finder import FoundIds
from worker.embedding.lookups import FetchedRows


def table_specs(
    plan: Plan, ids: FoundIds, orders: Sequence[tf.Tensor] = ()
) -> tuple[tuple[tf.TensorSpec, ...], ...]:
    """Of the places of each call, of ``orders``, and of the rows of each table, as a step is traced
    for them."""
    return (
        tuple(tf.TensorSpec(shape, tf.int32) for shape in ids.shapes),
        tuple(tf.TensorSpec([None], tf.int32) for _ in orders),
        tuple(tf.TensorSpec([None, table.width], tf.float32) for table in plan.tables),
    )


def row_gradients(plan: Plan, tables: FetchedRows, changes: Sequence[Any]) -> list[tf.Tensor]:
    """The gradients of the rows of each table, float32: one for each row where ``tables`` has
    orders, else one for each id of the batch."""
    gradients = []
    for index, (table, change) in enumerate(zip(plan.tables, changes, strict=True)):
        if change is None:
            raise InvalidJob(
                f"the loss does not depend on table {table.name!r} for this batch, but did when "
                "the job was described; let it always do so"
            )
        # Of one gather.
        assert isinstance(change, tf.IndexedSlices)
        if not tables.orders:
            gradients.append(tf.convert_to_tensor(change.values))
            continue
        # By one thread, always in the same order: faster, too, than what sums up unsorted gradients
        # with several.
        order = tables.orders[index]
        places = tf.gather(change.indices, order)
        gradients.append(tf.math.segment_sum(tf.gather(change.values, order), places))
    return gradients
