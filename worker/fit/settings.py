"""Settings of a cluster: fields of its jobs, and options of ``coordinator up``."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import keras
import numpy as np

from psrpc.core.errors import InvalidArgument, InvalidSetting
from psrpc.options.config_keys import did_you_mean
from psrpc.options.declaration import gpu_choice
from worker.data.arrays import Arrays
from worker.job.checks import check_integer
from worker.job.job import Job

_UP = ("gpu", "gpu_memory_fraction", "intra_op_threads", "connect_timeout_s", "max_restarts")
"""Options of ``coordinator up`` that a cluster takes, beside those that it has by name."""

_THE_FITS = {
    "model",
    "loss",
    "loss_weights",
    "optimizer",
    "train",
    "eval",
    "metrics",
    "class_weight",
    "batch_size",
    "epochs",
    "evaluate_every_epoch",
    "init_from",
    "keep_best",
    "stop_early",
    "reduce_lr",
    "then",
    "then_after",
    "local_steps",
    "mode",
    "replicas",
}
"""Fields of a job that ``fit`` sets itself, or that callbacks replace."""


def check_settings(named: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Checks the arguments of ``pserver.Cluster`` when it is made.

    Args:
        named: its declared parameters.
        settings: its further keyword arguments.

    Raises:
        InvalidJob: a setting is unknown, ``fit`` sets it, its value is invalid, or it does not fit
            the mode.
        InvalidArgument: ``gpu`` is not a choice.
    """
    of_job = [field.name for field in fields(Job) if field.name not in _THE_FITS]
    known = list(dict.fromkeys([*_UP, *of_job]))
    for name in settings:
        if name in _THE_FITS:
            raise InvalidSetting(
                f"Cluster takes no {name}: it follows from the model and the call of fit"
            )
        if name not in known:
            hint = did_you_mean(name, [*known, *named]) or f"; it knows {', '.join(known)}"
            raise InvalidSetting(f"Cluster has no setting {name}{hint}")
    for name in ("shards", "workers", "replicas", "batch_hooks_every"):
        if name in ("shards", "workers") or named[name] is not None:
            check_integer(name, named[name], 1)
    mode, replicas = named["mode"], named["replicas"]
    if mode != "sync" and replicas:
        raise InvalidSetting(f"replicas is {replicas}, and mode {mode!r}; only sync has replicas")
    # Checks the form alone: only workers know whether there is such a GPU.
    try:
        gpu_choice(str(settings.get("gpu", "auto")))
    except ArgumentTypeError as error:
        raise InvalidArgument(f"gpu: {error}") from None
    given = {name: value for name, value in settings.items() if name in of_job}
    if mode == "sync":
        # By default replicas follow from the batch size, which is not known here.
        given["replicas"] = replicas or settings.get("aggregate") or 1
    data = Arrays(np.zeros(1), np.zeros(1))
    # The job itself would say the same, much later.
    Job(model=keras.Model, train=data, batch_size=1, mode=mode, **given).policy()


def job_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are fields of the job."""
    return {name: value for name, value in settings.items() if name not in _UP}


def up_flags(settings: Mapping[str, Any]) -> list[str]:
    """Returns the settings that are options of ``coordinator up``, as arguments of its command
    line."""
    found = []
    for name in _UP:
        if name in settings:
            flag = {"connect_timeout_s": "connect-timeout"}.get(name, name.replace("_", "-"))
            found.append(f"--{flag}={settings[name]}")
    return found
