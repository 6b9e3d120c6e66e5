"""The part of a compiled step that has to do with the rows of embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from psrpc.errors import InvalidJob
from psrpc.plan import Plan
from worker.id_finder import FoundIds
from worker.lookups import FetchedRows


def table_specs(plan: Plan, ids: FoundIds) -> tuple[tuple[tf.TensorSpec, ...], ...]:
    """Of the places of each call, and of the rows of each table, as a step is traced for them."""
    return (
        tuple(tf.TensorSpec(shape, tf.int32) for shape in ids.shapes),
        tuple(tf.TensorSpec([None, table.width], tf.float32) for table in plan.tables),
    )


def row_gradients(plan: Plan, tables: FetchedRows, changes: Sequence[Any]) -> list[tf.Tensor]:
    """The gradients of the rows of each table, dense, those of ids that came twice summed up."""
    gradients = []
    for table, rows, change in zip(plan.tables, tables.rows, changes, strict=True):
        if isinstance(change, tf.IndexedSlices):
            # In the order of the batch, whatever the number of threads.
            change = tf.math.unsorted_segment_sum(change.values, change.indices, tf.shape(rows)[0])
        elif change is None:
            raise InvalidJob(
                f"the loss does not depend on table {table.name!r} for this batch, but did when "
                "the job was described; let it always do so"
            )
        gradients.append(change)
    return gradients
