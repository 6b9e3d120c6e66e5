"""Values that a Job refuses, and the number of its updates."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from psrpc.core.errors import InvalidJob
from psrpc.options.job_keys import INSTEAD
from worker import Arrays, Job


def make_job(records: int = 100, **fields: Any) -> Job:
    data = Arrays(np.zeros((records, 2), np.float32), np.zeros(records, np.int64))
    return Job(
        **{
            "model": lambda: None,
            "loss": "mse",
            "optimizer": "sgd",
            "train": data,
            "batch_size": 10,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("batch_size", 0, "batch_size is 0 (int); expected a whole number of at least 1"),
        ("batch_size", 2.0, "batch_size is 2.0 (float)"),
        ("batch_size", True, "batch_size is True (bool)"),
        ("epochs", -3, "epochs is -3 (int)"),
        ("epochs", math.nan, "epochs is nan (float)"),
        ("seed", -1, "seed is -1 (int); expected a whole number of at least 0"),
        ("replicas", 0, "replicas is 0 (int)"),
        ("checkpoint_every", 0, "checkpoint_every is 0 (int); expected steps (500) or time with"),
        ("checkpoint_every", "60", "checkpoint_every is '60' (str); expected steps (500) or time"),
        ("checkpoint_every", "60x", "checkpoint_every is '60x' (str)"),
        ("checkpoint_every", "0s", "checkpoint_every is '0s' (str)"),
        ("checkpoint_every", "-1s", "checkpoint_every is '-1s' (str)"),
        ("checkpoint_every", True, "checkpoint_every is True (bool)"),
        ("checkpoint_every", 60.0, "checkpoint_every is 60.0 (float)"),
        ("keep_checkpoints", 0, "keep_checkpoints is 0 (int); expected a whole number of at lea"),
        ("full_checkpoint_every", 0, "full_checkpoint_every is 0 (int); expected a whole numbe"),
        ("keep_best", 3, "keep_best is 3 (int); expected a name like 'min:loss'"),
        ("keep_best", "gain", "keep_best is 'gain'; say in which direction it gets better"),
        ("keep_best", "loss", "keep_best is 'loss', but eval is None; nothing is evaluated"),
        ("evaluate_every_epoch", 3, "evaluate_every_epoch is 3 (int); expected True or False"),
        ("evaluate_every_epoch", True, "evaluate_every_epoch is True, but eval is None"),
        ("intra_op_threads", "2", "intra_op_threads is '2' (str)"),
        ("mode", "fast", "mode is 'fast' (str); expected async or sync or ssp"),
        ("then", "later", "then is 'later' (str); expected async or sync or ssp or None"),
        ("then_after", 0, "then_after is 0 (int); expected a whole number of at least 1"),
        ("local_steps", 0, "local_steps is 0 (int); expected a whole number of at least 1"),
        ("scale_lr", "sqrt", "scale_lr is 'sqrt' (str); expected linear or None"),
        ("warmup_epochs", -1.0, "warmup_epochs is -1.0 (float); expected a number of at least 0"),
        ("warmup_epochs", math.inf, "warmup_epochs is inf (float)"),
        ("seed", 1 << 64, "seed is 18446744073709551616 (int); expected a whole number of at most"),
        ("engine", "jax", "engine is 'jax' (str); expected keras or numpy"),
        ("dense", "ring", "dense is 'ring' (str); expected shards or allreduce"),
        (
            "wire_dtype",
            "int8",
            "wire_dtype is 'int8' (str); expected float32 or bfloat16 or float16",
        ),
        ("compression", "top", "compression is 'top' (str); expected topk or int8 or None"),
        ("compression", "None", "compression is 'None' (str)"),
        ("topk", 0, "topk is 0 (int); expected a number above 0 and at most 0.5"),
        ("topk", 0.6, "topk is 0.6 (float)"),
        ("topk", math.nan, "topk is nan (float)"),
        ("topk", "0.1", "topk is '0.1' (str)"),
        ("model", 3, "model is 3 (int); expected a function"),
        ("loss", 3, "loss is 3 (int); expected a Keras loss"),
        ("loss", dict, "loss is <class 'dict'> (type)"),
        ("optimizer", 0.1, "optimizer is 0.1 (float); expected a Keras optimizer"),
        ("metrics", "accuracy", "metrics is 'accuracy' (str); expected a list"),
        ("metrics", [3], "metrics contains 3 (int)"),
        ("train", np.zeros(3), "expected a data source"),
        ("train", Arrays, "expected a data source"),
        ("eval", [1], "eval is [1] (list); expected a data source"),
        ("init_from", 3, "init_from is 3 (int); expected a path"),
        ("batch_sizes", 3, "Job has no field batch_sizes; did you mean 'batch_size'?"),
        ("callbacks", [], "Job has no field callbacks; stop_early and reduce_lr stand for Early"),
        ("validation_data", 3, "no field validation_data; eval= takes the evaluation data"),
        ("lr", 0.1, "no field lr; it is an argument of the optimizer: optimizer=keras"),
        ("steps_per_epoch", 3, "no field steps_per_epoch; an epoch is one pass over train"),
        (
            "xyz",
            3,
            "Job has no field xyz; its fields are model, loss, loss_weights, optimizer, ",
        ),
    ],
)
def test_a_job_names_the_field_the_value_and_what_is_expected(
    field: str, value: Any, says: str
) -> None:
    with pytest.raises(InvalidJob) as raised:
        make_job(**{field: value})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_a_name_of_keras_is_answered_with_what_there_is_instead(name: str) -> None:
    known = {field.name for field in fields(Job)}
    assert name not in known
    with pytest.raises(InvalidJob) as raised:
        make_job(**{name: 3})
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 300
    # What looks like a field of the job is one.
    others = {"train", "eval", *re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", INSTEAD[name])}
    assert others - known <= {"learning_rate", "sample_weight"}


def test_updates_of_the_whole_job_in_both_modes() -> None:
    job = make_job(records=101, batch_size=10, epochs=4, replicas=3)
    # 11 batches, the last of one record; 4 rounds, the last of two batches.
    assert job.total_updates() == 4 * 11
    assert replace(job, mode="sync").total_updates() == 4 * 4
    assert replace(job, mode="sync", aggregate=2).total_updates() == 4 * 6
    rule = replace(job, mode="sync", then="async", then_after=1)
    assert rule.total_updates() == 4 + 3 * 11
    # Batches of 20 records, the last of one: 6, and 2 rounds. The optimizer takes two steps each.
    local = replace(job, local_steps=2)
    assert (local.total_updates(), local.optimizer_updates()) == (4 * 6, 4 * 12)
    assert replace(local, mode="sync").total_updates() == 4 * 2


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("mode", "async", "is for mode sync, but mode is 'async'"),
        ("mode", "ssp", "is for mode sync, but mode is 'ssp'"),
        ("then", "async", "is for mode sync, but mode is 'async'"),
        ("compression", "int8", "which compression='int8' does not fit; leave compression out, or"),
        ("local_steps", 2, "which local_steps=2 does not fit; leave local_steps out, or"),
        ("devices", "columns", "which devices='columns' does not fit; leave devices out, or"),
    ],
)
def test_what_does_not_fit_slices_in_workers_is_refused(field: str, value: Any, says: str) -> None:
    fits: dict[str, Any] = {
        "dense": "allreduce",
        "mode": "sync",
        "replicas": 2,
        "epochs": 2,
    }
    make_job(**fits).policy()
    more = {"staleness": 1} if value == "ssp" else {"then_after": 1} if field == "then" else {}
    with pytest.raises(InvalidJob) as raised:
        make_job(**fits | {field: value} | more).policy()
    assert str(raised.value).startswith("dense is 'allreduce', which")
    assert says in str(raised.value)
    assert str(raised.value).endswith("dense='shards'")


def test_slices_without_allreduce_are_refused() -> None:
    with pytest.raises(InvalidJob, match="slices is 2, but dense is 'shards'; leave slices out"):
        make_job(slices=2).policy()


def test_a_job_file_can_be_checked_without_tensorflow() -> None:
    code = "import sys; from worker import Job, Npz, Function, Csv, TfRecords, Arrays; "
    code += "import worker.job.overrides, worker.job.loader, worker.data.permutation; "
    code += "print([m for m in ('tensorflow', 'keras') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_worker_imports_next_to_nothing() -> None:
    code = "import sys, worker; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
