"""What the coordinator has to know of a job, found by building it once.

The coordinator runs ``worker describe JOB`` as a child process and reads the JSON it prints, so
that neither TensorFlow nor the user's code ever runs in the coordinator itself.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pserver.updates.allowlist import needs_single_shard, placement_for
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob, error_line
from psrpc.core.plan import Plan, VariableSpec, make_plan
from psrpc.core.text import counted
from psrpc.files.remote import exists, location
from psrpc.files.remote_calls import give_up_after
from psrpc.options.job_keys import UserCodeFailed
from psrpc.options.job_source import first_look
from worker.data.ragged import as_tensor
from worker.data.source import Batch, check_count, map_arrays
from worker.job.job import Job
from worker.job.loader import LoadedJob, load_job, user_code
from worker.job.overrides import check_rounds
from worker.job.plateau import parse_keep_best, parse_reduce_lr, parse_stop_early
from worker.job.settings import only_while_loading
from worker.model.loss_scale import weighed
from worker.runtime.quiet import STDERR, STDOUT, import_tensorflow, redirected

if TYPE_CHECKING:
    from worker.describe.tables import AskedRows
    from worker.step.keras_step import KerasStep
    from worker.step.module_step import ModuleStep

_PATIENCE_S = 20.0
"""How long stores are tried that do not answer."""

FORMAT = 1
"""Of the JSON. Load-bearing: the coordinator refuses others."""


@only_while_loading()
def describe_main(path: str, settings: Sequence[str] = (), mode: str | None = None) -> int:
    """Prints the description of the job at ``path`` as one JSON object on stdout.

    Whatever else the job file or TensorFlow write to stdout goes to stderr instead. On an error
    nothing is printed there; stderr gets the user's traceback, if the user's code raised, and one
    line.

    Returns:
        The exit status: 0, or 2 on an error.
    """
    # The description needs no GPU, and the memory of one belongs to the workers.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    if mode is not None:
        settings = [*settings, f"mode={mode}"]
    # Somebody waits for it.
    give_up_after(_PATIENCE_S)
    with redirected(STDOUT, STDERR) as stdout:
        try:
            first_look(Path(path), settings)
            import_tensorflow()
            loaded = load_job(path, settings)
            check_rounds(loaded.job, settings)
            document = json.dumps(describe(loaded), allow_nan=False)
        except InvalidJob as error:
            if isinstance(error, UserCodeFailed):
                sys.stderr.write(error.user_traceback)
            sys.stderr.write(error_line(error) + "\n")
            return 2
        with os.fdopen(os.dup(stdout), "w") as out:
            out.write(document + "\n")
    return 0


def describe(loaded: LoadedJob) -> dict[str, Any]:
    """The description of a job: plain JSON types, keys as the coordinator reads them.

    Reads the data's size and first records, builds the model from the job's seed, traces one
    training step without running it, and looks at the labels.

    Raises:
        InvalidJob: whatever makes the job impossible to train; the message names it.
    """
    from pserver.updates.keras_slots import slot_names
    from worker.describe.tables import described_tables
    from worker.model.build import serialized_optimizer
    from worker.model.compiled import complete
    from worker.step.initializer import check_fits, first_rows
    from worker.step.local_sgd import LocalSgd, shard_optimizer

    job = loaded.job
    policy, then = job.policy(), job.then_policy()  # refuses what does not fit together
    _check_paths(job)
    records, eval_records = _check_data(job)
    example = _first_records("train", job, min(job.batch_size, records))
    job, model = complete(job, _head(example))
    found = _describe_model(job, model, example, eval_records)
    variables, trained, metrics, unsummed, asked = found
    if job.init_from is not None:
        check_fits(model, variables, job.init_from)
    optimizer = serialized_optimizer(job, loaded.optimizer_arguments, trained)
    tables = described_tables(job, asked, optimizer)
    # Every check of the plan that does not depend on the number of shards.
    plan = make_plan(variables, 1, "cut", tables)
    _check_wire(job, plan)
    local_rate = None
    if job.local_steps > 1:
        LocalSgd.of(optimizer)  # refuses others
        rate = optimizer["config"]["learning_rate"]
        local_rate = float(rate) if isinstance(rate, int | float) else None
        optimizer = shard_optimizer()
    if job.engine == "numpy":
        NumpyEngine(optimizer, plan, 0)  # refuses what it cannot do; holds no parameters yet
    placement = placement_for(optimizer, variables)
    document = {
        "format": FORMAT,
        "name": loaded.name,
        "job_sha256": loaded.sha256,
        "policy": policy.to_json(),
        "then": then and {"policy": then.to_json(), "epoch": job.then_after},
        "local_steps": job.local_steps,
        "local_learning_rate": local_rate,
        "scale_lr": job.scale_lr,
        "warmup_epochs": float(job.warmup_epochs),
        "batch_size": job.batch_size,
        "epochs": job.epochs,
        "seed": job.seed,
        "train_records": records,
        "eval_records": eval_records,
        "data_fingerprint": job.train.fingerprint(),
        "variables": [vars(v) | {"shape": list(v.shape)} for v in variables],
        "optimizer": optimizer,
        "engine": job.engine,
        "slots": slot_names(optimizer, make_plan(variables, 1, placement, tables)),
        "placement": placement,
        "needs_single_shard": needs_single_shard(optimizer),
        "checkpoint_every": job.checkpoint_every,
        "full_checkpoint_every": job.full_checkpoint_every,
        "keep_checkpoints": job.keep_checkpoints,
        "keep_best": _describe_keep_best(job, metrics),
        "stop_early": _describe_stop_early(job, metrics),
        "reduce_lr": _describe_reduce_lr(job, metrics, optimizer),
        "evaluate_every_epoch": job.evaluate_every_epoch,
        "intra_op_threads": job.intra_op_threads,
        "wire_dtype": job.wire_dtype,
        "compression": job.compression,
        "topk": job.topk,
        "total_updates": job.total_updates(),
        "metrics": ["loss", *metrics] if eval_records else ["loss"],
        "unsummed_metrics": unsummed,
    }
    if asked is not None:
        document["tables"] = [table.to_json() for table in tables]
        if beginning := first_rows(job, plan):
            document["first_rows"] = beginning
        document["rows_nbytes"] = asked.rows_nbytes(tables, _naming(job, example))
    return document


def _describe_keep_best(job: Job, metrics: Sequence[str]) -> dict[str, Any] | None:
    kept = None
    if job.keep_best is not None:
        name, direction = parse_keep_best(job.keep_best)
        _check_evaluated("keep_best", job.keep_best, name, metrics)
        kept = {"metric": name, "lower": direction == "min"}
    stop = None if job.stop_early is None else parse_stop_early(job.stop_early)
    if stop is None or not stop["restore_best"]:
        return kept
    restored = {"metric": stop["metric"], "lower": stop["lower"]}
    if kept not in (None, restored):
        raise InvalidJob(
            f"keep_best is {job.keep_best!r} and stop_early {job.stop_early!r}, which restores the "
            "best of something else; leave keep_best out"
        )
    return restored


def _describe_stop_early(job: Job, metrics: Sequence[str]) -> dict[str, Any] | None:
    if job.stop_early is None:
        return None
    found = parse_stop_early(job.stop_early)
    _check_evaluated("stop_early", job.stop_early, found["metric"], metrics)
    return found


def _describe_reduce_lr(
    job: Job, metrics: Sequence[str], optimizer: dict[str, Any]
) -> dict[str, Any] | None:
    if job.reduce_lr is None:
        return None
    found = parse_reduce_lr(job.reduce_lr)
    _check_evaluated("reduce_lr", job.reduce_lr, found["metric"], metrics)
    rate = optimizer["config"].get("learning_rate")
    if not isinstance(rate, int | float) or not rate > 0:
        kind = rate.get("class_name") if isinstance(rate, dict) else rate
        raise InvalidJob(
            f"reduce_lr is {job.reduce_lr!r}, but the optimizer's learning rate is {kind}, a "
            "schedule; only one that is a number above 0 can be reduced: "
            "--set optimizer.learning_rate=0.01, or leave reduce_lr out"
        )
    return found


def _check_evaluated(field: str, text: str, name: str, metrics: Sequence[str]) -> None:
    known = ["loss", *metrics]
    if name not in known:
        plain = name.removeprefix("val_")
        hint = f" (write {plain!r}: all are of evaluations)" if plain in known else ""
        raise InvalidJob(
            f"{field} is {text!r}, but evaluations have no {name!r}; they have "
            f"{', '.join(known)}{hint}"
        )


def _check_paths(job: Job) -> None:
    if job.init_from is None:
        return
    place = location(job.init_from)
    if not (place.exists() if isinstance(place, Path) else exists(place)):
        where = f" in {Path.cwd()}" if isinstance(place, Path) else ""
        raise InvalidJob(f"init_from is {str(place)!r}; there is no such file or checkpoint{where}")
    from worker.step.initializer import source_of

    source_of(job.init_from)  # refuses a directory of another kind


def _check_wire(job: Job, plan: Plan) -> None:
    asked = {"wire_dtype": job.wire_dtype, "compression": job.compression}
    for name, value in asked.items():
        if value not in ("float32", None) and not any(arena.encodable for arena in plan.arenas):
            raise InvalidJob(
                f"{name} is {value!r}, but no trainable variable is float32, and others always "
                f"travel as they are; leave {name} out"
            )


def _check_data(job: Job) -> tuple[int, int]:
    """How many records there are to train on and to evaluate on."""
    with user_code("train"):
        records = job.train.num_records
    if not records:
        raise InvalidJob("train holds no records; there is nothing to train on")
    then = job.then_policy()
    factors = {
        "batch_size": job.batch_size,
        "replicas": max(job.policy().open, 1 if then is None else then.open),
        "local_steps": job.local_steps,
    }
    factors = {name: factor for name, factor in factors.items() if factor > 1}
    needed = math.prod(factors.values())
    # A batch that is larger than the data is one of all of it, which the coordinator remarks on; a
    # round or local steps would have fewer batches than the job asks for.
    if records < needed and set(factors) != {"batch_size"}:
        raise InvalidJob(
            f"train holds {counted(records, 'record')}, less than one global batch of {needed} "
            f"({' x '.join(f'{name} {factor}' for name, factor in factors.items())}); use more "
            f"data, or a smaller {' or '.join(factors)}"
        )
    if job.eval is None:
        return records, 0
    with user_code("eval"):
        eval_records = job.eval.num_records
    if not eval_records:
        raise InvalidJob("eval holds no records; give it some, or --set eval=none")
    return records, eval_records


def _first_records(name: str, job: Job, count: int) -> Batch:
    """Records of the first batch: what a worker reads first, by the way in which it reads."""
    with user_code(name):
        if name == "eval":
            assert job.eval is not None  # the caller has counted its records
            return check_count(name, job.eval.read_range(0, count), count)
        found = check_count(name, job.train.read(job.seed, BatchId(0, 0, count)), count)
        return weighed(found, job.class_weight)


def _describe_model(
    job: Job, model: Any, example: Batch, eval_records: int
) -> tuple[list[VariableSpec], list[tuple[str, Any]], list[str], list[str], AskedRows | None]:
    """The variables, those of them that are trained with their names, the names of the metrics, and
    of those that do not add up, and what the first batch asks of embedding tables, if any."""
    import keras

    from worker.describe.tables import asked_rows
    from worker.embedding.lookups import NoRows, look_up
    from worker.model.inputs import check_inputs
    from worker.model.variables import model_variables

    check_inputs(model, example[0])
    names: list[str] = []
    unsummed: list[str] = []
    if isinstance(model, keras.Model):
        names, unsummed = _check_outputs(job, model, example, eval_records)
    elif job.metrics:
        raise InvalidJob(
            f"metrics is {job.metrics!r}, but the model is a tf.Module; metrics need a "
            "keras.Model, a tf.Module reports its loss"
        )
    found = model_variables(model)
    step = _make_step(job, model, found)
    nothing = NoRows()
    with look_up(nothing):
        without = _without_gradient(step, model, found, example)
    asked = None
    if nothing.asked:
        asked = asked_rows(job, model, step, [spec for spec, _ in found], example)
        without = _without_gradient(step, model, found, example, asked)
    elif not any(spec.role == "trainable" for spec, _ in found):
        raise InvalidJob("the model has no trainable variables; there is nothing to train")
    found = model_variables(model, without)
    if asked is None and not any(spec.role == "trainable" for spec, _ in found):
        raise InvalidJob(
            f"the loss depends on none of the trainable variables ({', '.join(sorted(without))})"
        )
    trained = [(spec.name, variable) for spec, variable in found if spec.role == "trainable"]
    return [spec for spec, _ in found], trained, names, unsummed, asked


def _naming(job: Job, example: Batch) -> AbstractContextManager[None]:
    """Names the record of the first batch that an error is about."""
    from worker.data.source import arrays_of
    from worker.embedding.record_names import name_in_batch, naming_record

    count = len(next(arrays_of(example[0])))
    name = name_in_batch(job.train, job.seed, BatchId(0, 0, count))
    return naming_record(example[0], count, name)


def _head(batch: Batch, count: int = 2) -> Batch:
    # Two records, since shapes of one are easily taken for something else.
    head: Batch = map_arrays(lambda array: array[:count], batch)
    return head


def _check_outputs(
    job: Job, model: Any, example: Batch, eval_records: int
) -> tuple[list[str], list[str]]:
    """Tries the model, the labels and the metrics on a few records; the metrics' names, and those
    of them that do not add up."""
    import numpy as np

    from worker.embedding.lookups import NoRows, look_up
    from worker.job.output_names import by_output, check_label_names
    from worker.model.build import BY_OUTPUT, build_metrics, layer_metrics, loss_trackers
    from worker.model.compiled import check_sample_weights, overrides_loss
    from worker.model.inputs import calling, check_input_names, check_inputs
    from worker.model.labels import check_labels, check_weights, counting, output_shape
    from worker.step.evaluator import metric_results

    head = _head(example)
    with calling(model, head[0]), look_up(NoRows()):
        outputs = model(map_arrays(as_tensor, head[0]), training=False)
    shape = output_shape(outputs)
    sources = [("train", job.train, example)]
    if job.eval is not None:
        few = min(job.batch_size, eval_records)
        sources.append(("eval", job.eval, _first_records("eval", job, few)))
    for name, source, batch in sources:
        with user_code(name):
            check_input_names(model, batch[0])
            if name == "eval":
                # Workers would find out at the end of the first epoch.
                check_inputs(model, batch[0])
                few_x = _head(batch)[0]
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
        several = metric.name == BY_OUTPUT
        given = by_output(model, outputs, job.metrics) if several else None
        with counting(metric.name, head[1], outputs, given):
            metric.update_state(map_arrays(as_tensor, head[1]), outputs)
            names += metric_results(metric.name, metric.result()) if several else [metric.name]
    return names, _unsummed(model, example, metrics, names)


def _unsummed(model: Any, example: Batch, metrics: list[Any], names: list[str]) -> list[str]:
    """The results of metrics, of the job and of layers, whose states do not add up."""
    from worker.data.source import arrays_of
    from worker.describe.summable import PART, is_kerass_own, not_summable, parts, results_of
    from worker.embedding.lookups import NoRows, look_up
    from worker.model.build import layer_metrics

    def counted(batch: Batch) -> None:
        x, y = map_arrays(as_tensor, batch[0]), map_arrays(as_tensor, batch[1])
        with look_up(NoRows()):
            outputs = model(x, training=False)
        for metric in metrics:
            metric.update_state(y, outputs)

    tried = parts([*layer_metrics(model), *metrics])
    if all(is_kerass_own(metric) for metric in tried):
        return []
    first, rest = _head(example, PART), _head(example, 2 * PART)
    if len(next(arrays_of(rest[0]))) > PART:
        rest = map_arrays(lambda array: array[PART:], rest)
    with user_code("the metrics"):
        found = not_summable(tried, [lambda: counted(first), lambda: counted(rest)])
    return [name for metric in found for name in results_of(metric, names)]


def _make_step(
    job: Job, model: Any, found: list[tuple[VariableSpec, Any]]
) -> KerasStep | ModuleStep:
    """The step that workers run."""
    import keras

    from worker.model.build import build_loss
    from worker.model.training_metrics import TrainingMetrics
    from worker.model.variables import seed_variables
    from worker.step.keras_step import KerasStep
    from worker.step.module_step import ModuleStep

    variables = [variable for _, variable in found]
    trainable = [spec.role == "trainable" for spec, _ in found]
    if isinstance(model, keras.Model):
        loss, metrics = build_loss(job, model), TrainingMetrics(job, model)
        return KerasStep(model, loss, variables, trainable, seed_variables(model), metrics)
    assert callable(job.loss)  # build_model has checked it
    return ModuleStep(model, job.loss, variables, trainable)


def _without_gradient(
    step: KerasStep | ModuleStep,
    model: Any,
    found: list[tuple[VariableSpec, Any]],
    example: Batch,
    asked: AskedRows | None = None,
) -> set[str]:
    """Names of trainable variables for which the step that workers run has no gradient, whatever
    the values. The step is traced as they trace it, and not run."""
    import keras
    import tensorflow as tf

    from worker.model.variables import seed_variables
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
        for (spec, _), change in zip(found, changes[: len(found)], strict=True):
            if spec.role == "trainable" and change is None:
                without.add(spec.name)
        if asked is not None:
            asked.check_gradients(changes[len(found) :])
        return loss

    with user_code("the training step"):
        traced = tf.function(trace).get_concrete_function(
            [tf.TensorSpec(spec.shape, spec.dtype) for spec, _ in found],
            tf.TensorSpec([len(seeds), 2], tf.int64),
            map_arrays(as_tensor, example),
            *(([], []) if asked is None else asked.specs()),
        )
    check_random(traced.graph)
    if isinstance(model, keras.Model):
        check_graph(traced.graph, model)
        named = zip(found, traced.inputs, strict=False)
        check_custom_gradients({s.name: value for (s, _), value in named if s.name in without})
    loss = traced.structured_outputs
    if loss.shape.rank != 0:
        raise InvalidJob(f"the loss has shape {loss.shape}; expected the mean, a scalar")
    return without
