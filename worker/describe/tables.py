"""Finds the embedding tables of a job in its model and first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from psrpc.core.plan import VariableSpec
from psrpc.core.tables import IdKind, TableSpec
from worker.data.ragged import as_tensor
from worker.data.source import Array, Batch, map_arrays
from worker.embedding.id_finder import IdsTrace, Model, trace_ids
from worker.embedding.lookups import FetchedRows
from worker.embedding.row_sets import rows_nbytes
from worker.embedding.rows import find_rows
from worker.job.job import Job
from worker.job.loader import user_code
from worker.model.variables import seed_variables


@dataclass(frozen=True, eq=False)
class AskedRows:
    """The look-ups of a first batch, with the ids passed to each call of a layer."""

    trace: IdsTrace
    ids: tuple[Array, ...]

    def rows_nbytes(
        self,
        tables: Sequence[TableSpec],
        naming: AbstractContextManager[None] = nullcontext(),  # noqa: B008
    ) -> int:
        """Returns the bytes of the rows that the batch needs; ``naming`` names the record of an
        error. Raises InvalidJob if an id is outside its vocabulary, or there are too many."""
        with user_code("the first batch"), naming:
            needed, _, _ = find_rows(tables, self.trace.calls, self.ids, 1)
        return rows_nbytes(tables, needed)

    def specs(self) -> tuple[list[tf.TensorSpec], list[tf.TensorSpec]]:
        """Returns specs of each call's places and each table's rows, to trace a step."""
        return (
            [tf.TensorSpec(shape, tf.int32) for shape in self.trace.shapes],
            [tf.TensorSpec([None, table.width], tf.float32) for table in self.trace.tables],
        )

    def fetched(self, rows: Sequence[tf.Tensor], places: Sequence[tf.Tensor]) -> FetchedRows:
        """Returns the rows for the look-ups of the step's layers."""
        return FetchedRows(rows, self.trace.calls, places)

    def check_gradients(self, gradients: Sequence[Any]) -> None:
        """Raises InvalidJob if a table has no gradient."""
        for table, gradient in zip(self.trace.tables, gradients, strict=True):
            if gradient is None:
                raise InvalidJob(
                    f"the loss does not depend on the rows of table {table.name!r} (layer "
                    f"{table.layer!r}); nothing would ever train them"
                )


def asked_rows(
    job: Job, model: Any, step: Model, variables: Sequence[VariableSpec], example: Batch
) -> AskedRows:
    """Traces the look-ups of the batch ``example`` in training. Raises InvalidJob if the ids cannot
    be found ahead of a step, layers disagree on a table, or settings exclude tables."""
    _check_settings(job)
    seeds = tf.zeros([len(seed_variables(model)), 2], tf.int64)
    batch = map_arrays(as_tensor, example)
    with user_code("the model"):
        trace = trace_ids(step, variables, seeds, batch)
        tensors = tf.nest.flatten((seeds, batch), expand_composites=True)
        ids = tuple(np.array(each) for each in trace.find(tensors))
    return AskedRows(trace, ids)


def described_tables(
    job: Job, asked: AskedRows | None, optimizer: Mapping[str, Any]
) -> list[TableSpec]:
    """Returns the tables for the plan; ``optimizer`` is the job's, serialized. Raises InvalidJob if
    a table's optimizer cannot update rows."""
    if asked is None:
        return []
    return [
        replace(table.spec(optimizer, job.seed), id_kind=_id_kind(asked.trace, index))
        for index, table in enumerate(asked.trace.tables)
    ]


def _id_kind(trace: IdsTrace, table: int) -> IdKind:
    """Returns the kind of ids that layers pass to a table."""
    strings = {call.rule.strings for call in trace.calls if call.table == table}
    if len(strings) > 1:
        return "both"
    return "strings" if True in strings else "numbers"


def _check_settings(job: Job) -> None:
    if job.local_steps > 1:
        raise InvalidJob(
            f"local_steps is {job.local_steps}, but the model has embedding tables: rows are "
            "fetched for one step and updated by the shards alone; leave local_steps out"
        )
    for policy in (job.policy(), job.then_policy()):
        if policy is not None and policy.delay_compensation is not None:
            raise InvalidJob(
                f"delay_compensation is {policy.delay_compensation!r}, but the model has embedding "
                "tables: shards keep no earlier rows to correct a gradient by; leave it out"
            )
