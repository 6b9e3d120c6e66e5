"""Evaluates one frozen snapshot, in tasks whose metric states add up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidArgument, InvalidJob
from psrpc.core.plan import Plan
from psrpc.v1 import coordinator_pb2 as pb
from worker.data.source import Array, Batch, check_count
from worker.embedding.id_finder import table_specs
from worker.embedding.lookups import FetchedRows, NoRows
from worker.embedding.record_names import naming_record
from worker.embedding.row_sets import ReceivedRows, RowSets
from worker.job.loader import user_code
from worker.model.build import BY_OUTPUT, layer_metrics, loss_trackers
from worker.model.inputs import check_whole_numbers, whole_inputs
from worker.model.metrics import build_metrics, counted_by
from worker.runtime.devices import Device, ParameterBuffers, tensor_of
from worker.runtime.trace import TRACING, Trace, graph_function
from worker.step.arenas import split_arenas
from worker.step.compute import with_ids
from worker.step.flat import StepInput
from worker.step.gradient_source import PullSnapshot
from worker.step.keras_step import KerasStep
from worker.step.module_step import ModuleStep
from worker.step.replica import Replica

LARGER = 4
"""Training batches per evaluation batch: evaluation keeps no gradients, so more records fit into
memory. It is 1 instead with embedding tables, where a batch may need only so many rows."""


class Evaluator:
    """The compiled evaluation step and its metrics. One thread uses it.

    The states of an evaluation are those of the mean loss, ``[2]`` (sum over records, number of
    records), followed by every variable of the job's metrics, in the job's order.
    """

    def __init__(self, replica: Replica, plan: Plan, device: Device) -> None:
        self._job = replica.job
        self._model = replica.model
        self._inputs = whole_inputs(replica.model)
        self._plan = plan
        self._device = device
        self._step: KerasStep | ModuleStep = replica.make_step(plan)
        self._parameters = ParameterBuffers.of(plan)
        self._pulled: tuple[int, str] | None = None
        self._metrics: list[Any] | None = None
        """The metrics of the step, then :attr:`_counted`."""
        self._counted: list[Any] = []
        self._larger = 1 if plan.tables else LARGER
        self._finder = replica.make_finder(plan, training=False)
        (self._seeds,) = device.place((np.zeros((replica.num_seeds(), 2), np.int64),))
        self._rows = RowSets(plan.tables)
        self._traces: dict[object, Trace] = {}

    def evaluate(
        self, task: pb.EvaluateTask, generation: int, pull: PullSnapshot
    ) -> pb.EvaluateDone:
        """Evaluates the records of ``task`` on its snapshot of ``generation``. Raises InvalidJob if
        the data source or the model fails."""
        # Another generation may have a snapshot of the same name.
        wanted = (generation, task.snapshot)
        if self._pulled != wanted:
            self._pulled = None
            pull(task.snapshot, self._parameters.arrays)
            self._pulled = wanted

        def pull_rows(rows: ReceivedRows) -> None:
            pull(task.snapshot, None, rows=rows)

        states = self.states(self._parameters, task.start, task.stop, pull_rows)
        return pb.EvaluateDone(
            evaluation=task.evaluation,
            task=task.task,
            records=task.stop - task.start,
            states=pb.MetricStates(variables=states),
        )

    def states(
        self,
        parameters: ParameterBuffers,
        start: int,
        stop: int,
        pull_rows: Callable[[ReceivedRows], None] | None = None,
    ) -> list[pb.MetricVariable]:
        """Returns the states after records ``[start, stop)`` of the evaluation data; ``pull_rows``
        receives rows of embedding tables."""
        metrics = self._reset_metrics()
        arenas = self._device.receive(parameters.tensors)
        total = 0.0
        for first in range(start, stop, self._larger * self._job.batch_size):
            last = min(first + self._larger * self._job.batch_size, stop)
            batch = self._read(first, last)
            what = f"the evaluation of records {first} to {last}"
            given = StepInput(self._seeds, batch)
            values: Sequence[Array] = ()
            if self._finder is not None:
                assert pull_rows is not None  # callers with tables pass it
                names = naming_record((), last - first, _names(first))
                with user_code(f"the ids of records {first} to {last}"), names:
                    given = with_ids(self._finder, self._device, self._seeds, batch)
                assert given.needed is not None  # there are tables
                rows = self._rows.place(given.needed)
                pull_rows(rows)
                values = rows.values
            with user_code(what):
                loss = self._loss(arenas, given, values)
            total += float(loss) * (last - first)
        return [
            _state(np.array([total, stop - start])),
            *(_state(variable.numpy()) for metric in metrics for variable in metric.variables),
        ]

    def merge(self, merge: pb.MergeEvaluation) -> pb.MergeDone:
        """Returns the results of summed states, by Keras metric name. Raises InvalidArgument if the
        states are not of this job's metrics."""
        metrics = self._reset_metrics()
        variables = [variable for metric in metrics for variable in metric.variables]
        loss, *states = merge.states.variables
        if merge.training:
            shapes = [variable.shape for variable in variables]
            if sum(map(math.prod, shapes)) != sum(len(state.values) for state in states):
                # The epoch ran with other metrics, before the run was resumed.
                metrics, variables, states = [], [], []
            else:
                states = _cut(states, shapes)
        if len(states) != len(variables):
            raise InvalidArgument(
                f"evaluation {merge.evaluation!r} has {len(states)} metric variables; "
                f"this job's metrics have {len(variables)}"
            )
        for variable, state in zip(variables, states, strict=True):
            if tuple(state.shape) != tuple(variable.shape):
                raise InvalidArgument(
                    f"evaluation {merge.evaluation!r} has a state of shape {list(state.shape)} for "
                    f"{variable.path!r}; expected {list(variable.shape)}"
                )
            variable.assign(np.reshape(state.values, variable.shape))
        total, count = loss.values
        results = {"loss": total / count if count else math.nan}
        for metric in metrics:
            results.update(metric_results(metric.name, metric.result()))
        return pb.MergeDone(evaluation=merge.evaluation, results=results)

    def _loss(
        self, arenas: tuple[tf.Tensor, ...], given: StepInput, rows: Sequence[Array]
    ) -> tf.Tensor:
        """Returns the loss of a batch, and updates the metrics with the batch."""
        received = self._device.receive(list(map(tensor_of, rows)))
        trace = self._traces.get(given.signature)
        if trace is None:
            # The step reads the metrics' variables, so it is traced after they exist.
            with TRACING:
                self._traces[given.signature] = trace = self._trace(arenas, given)
        (loss,) = trace((*arenas, *given.tensors, *received))
        return loss

    def _trace(self, arenas: tuple[tf.Tensor, ...], given: StepInput) -> Trace:
        calls = None if given.ids is None else given.ids.calls

        def run(
            arenas: tuple[tf.Tensor, ...],
            seeds: tf.Tensor,  # noqa: ARG001
            batch: Batch,
            places: tuple[tf.Tensor, ...],
            _orders: tuple[()],
            rows: tuple[tf.Tensor, ...],
        ) -> tf.Tensor:
            tables = None if calls is None else FetchedRows(rows, calls, places)
            with self._device.scope():
                with self._device.edge():
                    values = split_arenas(self._plan, arenas)
                loss, outputs = self._step.loss(values, batch, tables)
                for metric in self._counted:
                    metric.update_state(*counted_by(metric, self._model, batch, outputs))
                return loss

        concrete = graph_function(run).get_concrete_function(
            arenas, given.seeds, given.batch, *table_specs(self._plan, given.ids)
        )
        return Trace(concrete)

    def _read(self, start: int, stop: int) -> Batch:
        if self._job.eval is not None:
            with user_code("eval"):
                records = check_count("eval", self._job.eval.read_range(start, stop), stop - start)
        else:
            # Without evaluation data, training records serve to build the metrics.
            with user_code("train"):
                records = self._job.train.read(self._job.seed, BatchId(0, start, stop - start))
        if self._inputs:
            with user_code(f"the evaluation data, records {start} to {stop}"):
                check_whole_numbers(self._inputs, records[0])
        return self._device.place(records)

    def _reset_metrics(self) -> Sequence[Any]:
        """Returns the job's metrics, reset. The first call builds them on two records, since some
        metrics have no variables before they see data."""
        if self._metrics is None:
            source = self._job.eval or self._job.train
            batch = self._read(0, min(2, source.num_records))
            values = split_arenas(self._plan, self._parameters.tensors)
            with user_code("the evaluation"), TRACING, self._device.scope():
                _, outputs = self._step.loss(values, batch, NoRows())
                self._counted = []
                if outputs is not None:
                    self._counted = build_metrics(self._job, self._model, batch[1], outputs)
                for metric in self._counted:
                    metric.update_state(batch[1], outputs)
            if self._job.metrics and not self._counted:
                raise InvalidJob("metrics need a keras.Model; a tf.Module reports its loss")
            own = [*loss_trackers(self._model), *layer_metrics(self._model)]
            self._metrics = [*own, *self._counted]
        for metric in self._metrics:
            metric.reset_state()
        return self._metrics


def _cut(flat: Sequence[pb.MetricVariable], shapes: Sequence[Any]) -> list[pb.MetricVariable]:
    """Cuts the values of ``flat``, joined, into variables of ``shapes``. The sizes must match."""
    values = [value for variable in flat for value in variable.values]
    sizes = [math.prod(shape) for shape in shapes]
    ends = itertools.accumulate(sizes)
    return [
        pb.MetricVariable(shape=shape, values=values[end - size : end])
        for shape, size, end in zip(shapes, sizes, ends, strict=True)
    ]


def _state(value: Any) -> pb.MetricVariable:
    return pb.MetricVariable(shape=np.shape(value), values=np.ravel(value).astype(np.float64))


def metric_results(name: str, result: Any) -> dict[str, float]:
    """Returns a metric's result under its name; non-scalar results under several names."""
    if isinstance(result, dict):
        before = "" if name == BY_OUTPUT else f"{name}_"
        return {
            key: value
            for part, inner in result.items()
            for key, value in metric_results(f"{before}{part}", inner).items()
        }
    values = np.ravel(result)
    if values.size == 1:
        return {name: float(values[0])}
    return {f"{name}_{i}": float(value) for i, value in enumerate(values)}


def _names(first: int) -> Callable[[int], str]:
    return lambda place: f"record {first + place}"
