"""Describes a job's model: its variables, outputs and step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from psrpc.core.plan import VariableSpec
from worker.data.ragged import as_tensor
from worker.data.source import Batch, check_count, map_arrays, weighed
from worker.job.job import Job
from worker.job.loader import user_code

if TYPE_CHECKING:
    from worker.describe.tables import AskedRows
    from worker.step.keras_step import KerasStep
    from worker.step.module_step import ModuleStep


def describe_model(
    job: Job, model: Any, example: Batch, eval_records: int
) -> tuple[list[VariableSpec], list[tuple[str, Any]], list[str], list[str], AskedRows | None]:
    """Returns the variables, the trained ones with their names, the names of all metrics and of
    those that do not add up, and the table rows of the first batch, if any."""
    import keras

    from worker.describe.tables import asked_rows
    from worker.embedding.lookups import NoRows, look_up
    from worker.model.inputs import check_inputs
    from worker.model.placement import placed_layers
    from worker.model.variables import model_variables
    from worker.step.replica import build_step

    check_inputs(model, example[0])
    if job.devices is not None:
        placed_layers(model, job.devices)
    names: list[str] = []
    unsummed: list[str] = []
    if isinstance(model, keras.Model):
        names, unsummed = _check_outputs(job, model, example, eval_records)
    elif job.metrics:
        raise InvalidJob(
            f"metrics is {job.metrics!r}, but the model is a tf.Module; metrics need a "
            "keras.Model, a tf.Module reports its loss"
        )
    named = model_variables(model)
    step = build_step(job, model, named, counts=True)
    nothing = NoRows()
    with look_up(nothing):
        without = _without_gradient(step, model, named, example)
    asked = None
    if nothing.asked:
        asked = asked_rows(job, model, step, [spec for spec, _ in named], example)
        without = _without_gradient(step, model, named, example, asked)
    elif not any(spec.role == "trainable" for spec, _ in named):
        raise InvalidJob("the model has no trainable variables; there is nothing to train")
    named = model_variables(model, without)
    if asked is None and not any(spec.role == "trainable" for spec, _ in named):
        raise InvalidJob(
            f"the loss depends on none of the trainable variables ({', '.join(sorted(without))})"
        )
    trained = [(spec.name, variable) for spec, variable in named if spec.role == "trainable"]
    return [spec for spec, _ in named], trained, names, unsummed, asked


def naming(job: Job, example: Batch) -> AbstractContextManager[None]:
    """Returns a context that adds to an error which record of the first batch caused it."""
    from worker.data.source import arrays_of
    from worker.embedding.record_names import name_in_batch, naming_record

    count = len(next(arrays_of(example[0])))
    name = name_in_batch(job.train, job.seed, BatchId(0, 0, count))
    return naming_record(example[0], count, name)


def shown_head(batch: Batch, count: int = 2) -> Batch:
    # Two records, since shapes of a single one are ambiguous.
    head: Batch = map_arrays(lambda array: array[:count], batch)
    return head


def _check_outputs(
    job: Job, model: Any, example: Batch, eval_records: int
) -> tuple[list[str], list[str]]:
    """Checks the model, the labels and the metrics on a few records; returns the names of all
    metrics and of those that do not add up."""
    import numpy as np

    from worker.embedding.lookups import NoRows, look_up
    from worker.job.output_names import check_label_names
    from worker.model.build import BY_OUTPUT, layer_metrics, loss_trackers
    from worker.model.compiled import check_sample_weights, overrides_loss
    from worker.model.inputs import calling, check_input_names, check_inputs
    from worker.model.labels import check_labels, check_weights, output_shape
    from worker.model.metrics import build_metrics, naming_metric
    from worker.step.evaluator import metric_results

    head = shown_head(example)
    with calling(model, head[0]), look_up(NoRows()):
        outputs = model(map_arrays(as_tensor, head[0]), training=False)
    shape = output_shape(outputs)
    sources = [("train", job.train, example)]
    if job.eval is not None:
        few = min(job.batch_size, eval_records)
        sources.append(("eval", job.eval, first_records("eval", job, few)))
    for name, source, batch in sources:
        with user_code(name):
            check_input_names(model, batch[0])
            if name == "eval":
                # Workers would fail only at the end of the first epoch.
                check_inputs(model, batch[0])
                few_x = shown_head(batch)[0]
                with calling(model, few_x, "eval"), look_up(NoRows()):
                    model(map_arrays(as_tensor, few_x), training=False)
            if not overrides_loss(model):
                check_label_names(job, model, outputs, batch[1])
                check_sample_weights(job, model, outputs, batch)
        if shape is not None and isinstance(batch[1], np.ndarray):
            with user_code(name):
                check_labels(source, job.loss, batch[1], shape)
                if len(batch) > 2 and isinstance(batch[2], np.ndarray):
                    check_weights(job.loss, batch[2], shape)
    metrics = build_metrics(job, model, head[1], outputs)
    names = [tracker.name for tracker in loss_trackers(model)]
    for metric in layer_metrics(model):
        names += metric_results(metric.name, metric.result())
    for metric in metrics:
        with naming_metric(job, model, metric, head[1], outputs):
            metric.update_state(map_arrays(as_tensor, head[1]), outputs)
            several = metric.name == BY_OUTPUT
            names += metric_results(metric.name, metric.result()) if several else [metric.name]
    return names, _unsummed(model, example, metrics, names)


def _unsummed(model: Any, example: Batch, metrics: list[Any], names: list[str]) -> list[str]:
    """Returns the results of the job's and the layers' metrics whose states do not add up."""
    from worker.data.source import arrays_of
    from worker.embedding.lookups import NoRows, look_up
    from worker.model.build import layer_metrics
    from worker.model.metrics import PART, is_kerass_own, not_summable, parts, summable_results

    def counted(batch: Batch) -> None:
        x, y = map_arrays(as_tensor, batch[0]), map_arrays(as_tensor, batch[1])
        with look_up(NoRows()):
            outputs = model(x, training=False)
        for metric in metrics:
            metric.update_state(y, outputs)

    tried = parts([*layer_metrics(model), *metrics])
    if all(is_kerass_own(metric) for metric in tried):
        return []
    first, rest = shown_head(example, PART), shown_head(example, 2 * PART)
    if len(next(arrays_of(rest[0]))) > PART:
        rest = map_arrays(lambda array: array[PART:], rest)
    with user_code("the metrics"):
        failing = not_summable(tried, [lambda: counted(first), lambda: counted(rest)])
    return [name for metric in failing for name in summable_results(metric, names)]


def _without_gradient(
    step: KerasStep | ModuleStep,
    model: Any,
    named: list[tuple[VariableSpec, Any]],
    example: Batch,
    asked: AskedRows | None = None,
) -> set[str]:
    """Returns the names of trainable variables that get no gradient in the workers' step, for any
    values. Traces the step as workers do, without running it."""
    import keras
    import tensorflow as tf

    from worker.model.variables import seed_variables
    from worker.runtime.trace import graph_function
    from worker.step.step_graph import check_custom_gradients, check_graph, check_random

    seeds = seed_variables(model)
    without: set[str] = set()

    def trace(
        values: list[tf.Tensor],
        states: tf.Tensor,
        batch: Batch,
        places: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        tables = None if asked is None else asked.fetched(rows, places)
        loss, changes = step.differentiate(values, states, batch, tables)
        for (spec, _), change in zip(named, changes[: len(named)], strict=True):
            if spec.role == "trainable" and change is None:
                without.add(spec.name)
        if asked is not None:
            asked.check_gradients(changes[len(named) :])
        return loss

    with user_code("the training step"):
        traced = graph_function(trace).get_concrete_function(
            [tf.TensorSpec(spec.shape, spec.dtype) for spec, _ in named],
            tf.TensorSpec([len(seeds), 2], tf.int64),
            map_arrays(as_tensor, example),
            *(([], []) if asked is None else asked.specs()),
        )
    check_random(traced.graph)
    if isinstance(model, keras.Model):
        check_graph(traced.graph, model)
        inputs = zip(named, traced.inputs, strict=False)
        check_custom_gradients({s.name: value for (s, _), value in inputs if s.name in without})
    loss = traced.structured_outputs
    if loss.shape.rank != 0:
        raise InvalidJob(f"the loss has shape {loss.shape}; expected the mean, a scalar")
    return without


def first_records(name: str, job: Job, count: int) -> Batch:
    """Reads records of the first batch as a worker does."""
    with user_code(name):
        if name == "eval":
            assert job.eval is not None  # the caller counts its records
            return check_count(name, job.eval.read_range(0, count), count)
        batch = check_count(name, job.train.read(job.seed, BatchId(0, 0, count)), count)
        return weighed(batch, job.class_weight)
