"""Describes a job for the coordinator by building it once.

The coordinator runs ``worker describe JOB`` as a child process and reads its JSON, so that it never
runs TensorFlow or the user's code itself.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pserver.updates.allowlist import needs_single_shard, placement_for
from pserver.updates.numpy_engine import NumpyEngine
from psrpc.core.errors import InvalidJob, disk_code, disk_reason, error_line
from psrpc.core.placement import make_plan
from psrpc.core.plan import Plan
from psrpc.core.text import counted
from psrpc.files.description_file import DescriptionFile
from psrpc.files.remote import exists
from psrpc.files.remote_calls import give_up_after
from psrpc.files.storage import replace_text
from psrpc.files.urls import location
from psrpc.ops.extras import check_tensorflow
from psrpc.options.job_keys import UserCodeFailed
from psrpc.options.job_source import first_look
from worker.describe.model import describe_model, first_records, naming, shown_head
from worker.job.job import Job
from worker.job.loader import LoadedJob, load_job, only_while_loading, user_code
from worker.job.overrides import check_rounds
from worker.job.plateau import parse_keep_best, parse_reduce_lr, parse_stop_early
from worker.runtime.quiet import STDERR, STDOUT, import_tensorflow, redirected

_PATIENCE_S = 20.0
"""Seconds of retries on stores that do not answer."""

FORMAT = 1
"""Version of the JSON. Load-bearing: the coordinator refuses others."""


@only_while_loading()
def describe_main(
    path: str,
    settings: Sequence[str] = (),
    mode: str | None = None,
    output: Path | None = None,
) -> int:
    """Prints the description of the job at ``path`` as one JSON object on stdout, or writes it to
    ``output`` with the ``settings`` and the mode that it was made with.

    Other output of the job file or TensorFlow goes to stderr. After an error stdout stays empty;
    stderr gets one line, after the user's traceback if the user's code raised.

    Returns:
        The exit status: 0, or 2 on an error.
    """
    # The description needs no GPU, whose memory belongs to the workers.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    asked = settings
    if mode is not None:
        settings = [*settings, f"mode={mode}"]
    # The coordinator waits for the description.
    give_up_after(_PATIENCE_S)
    with redirected(STDOUT, STDERR) as stdout:
        try:
            first_look(Path(path), settings)
            check_tensorflow("`worker describe`")
            import_tensorflow()
            loaded = load_job(path, settings)
            check_rounds(loaded.job, settings)
            described = describe(loaded)
            if output is not None:
                described = DescriptionFile(tuple(asked), mode, described).to_json()
            document = json.dumps(described, allow_nan=False) + "\n"
            if output is not None:
                _write(output, document)
                return 0
        except InvalidJob as error:
            if isinstance(error, UserCodeFailed):
                sys.stderr.write(error.user_traceback)
            sys.stderr.write(error_line(error) + "\n")
            return 2
        with os.fdopen(os.dup(stdout), "w") as out:
            out.write(document)
    return 0


def _write(path: Path, document: str) -> None:
    try:
        replace_text(path, document)
    except OSError as error:
        raise InvalidJob(
            f"--output {path} cannot be written: {disk_reason(error)}", code=disk_code(error)
        ) from None


def describe(loaded: LoadedJob) -> dict[str, Any]:
    """Returns the description of a job: plain JSON types, keys as the coordinator reads them.

    Reads the data's size and first records, builds the model from the job's seed, traces one
    training step without running it, and checks the labels. Raises InvalidJob if the job cannot be
    trained.
    """
    from pserver.updates.keras_objects import keras_slot_names
    from worker.describe.tables import described_tables
    from worker.model.build import serialized_optimizer
    from worker.model.compiled import complete
    from worker.step.initializer import check_fits, first_rows
    from worker.step.local_sgd import LocalSgd, shard_optimizer

    job = loaded.job
    policy, then = job.policy(), job.then_policy()  # refuses contradictory settings
    _check_paths(job)
    records, eval_records = _check_data(job)
    example = first_records("train", job, min(job.batch_size, records))
    job, model = complete(job, shown_head(example))
    found = describe_model(job, model, example, eval_records)
    variables, trained, metrics, unsummed, asked = found
    if job.init_from is not None:
        check_fits(model, variables, job.init_from)
    optimizer = serialized_optimizer(job, loaded.optimizer_arguments, trained)
    tables = described_tables(job, asked, optimizer)
    if job.dense == "allreduce" and not variables:
        raise InvalidJob(
            "dense is 'allreduce', but the model has embedding tables alone, whose rows are on "
            "shards; say dense='shards'"
        )
    # Performs every check of the plan that does not depend on the number of shards.
    plan = make_plan(variables, 1, "cut", tables)
    _check_wire(job, plan)
    local_rate = None
    if job.local_steps > 1:
        LocalSgd.of(optimizer)  # refuses other optimizers
        rate = optimizer["config"]["learning_rate"]
        local_rate = float(rate) if isinstance(rate, int | float) else None
        optimizer = shard_optimizer()
    if job.engine == "numpy":
        NumpyEngine(optimizer, plan, 0)  # refuses what it cannot do; has no parameters yet
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
        "slots": keras_slot_names(optimizer, make_plan(variables, 1, placement, tables)),
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
        "exact": job.exact,
        "dense": job.dense,
        "slices": job.slices,
        "wire_dtype": job.wire_dtype,
        "prefetch_rows": job.prefetch_rows,
        "compression": job.compression,
        "topk": job.topk,
        "total_updates": job.total_updates(),
        "metrics": ["loss", *metrics] if eval_records else ["loss"],
        "unsummed_metrics": unsummed,
    }
    if loaded.search:
        document["search"] = dict(loaded.search)
    if asked is not None:
        document["tables"] = [table.to_json() for table in tables]
        if beginning := first_rows(job, plan):
            document["first_rows"] = beginning
        document["rows_nbytes"] = asked.rows_nbytes(tables, naming(job, example))
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
    """Returns the numbers of training and evaluation records."""
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
    # A batch larger than the data becomes one of all data, which the coordinator remarks on. A
    # round or local steps would have fewer batches than the job demands.
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
