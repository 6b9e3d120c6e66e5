"""Loss and metrics of training, from the totals that a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import keras
import numpy as np
from keras.src.utils.python_utils import pythonify_logs

from psrpc.checkpoint.load import opened
from psrpc.checkpoint.manifest import read_manifest
from psrpc.core.batch import LOSS
from psrpc.core.errors import InvalidJob
from psrpc.files.storage import DISK
from worker.data.ragged import as_tensor
from worker.data.source import map_arrays
from worker.model.build import layer_metrics, loss_trackers


def totals(checkpoint: Path, epoch: int) -> tuple[float, ...] | None:
    """Returns the totals of an epoch, counted from 0, as of a checkpoint: sums over the batches
    that shard 0 has applied, see :mod:`psrpc.core.batch`; None before the first of them. Reads a
    header alone.

    Raises:
        CheckpointError: it cannot be read.
    """
    manifest = read_manifest(checkpoint)
    (file,) = (file for file in manifest.files if file.shard == 0)
    with opened(checkpoint, manifest, file, DISK) as reader:
        for entry in reader.header.applied:
            if entry["epoch"] == epoch and entry.get("totals"):
                return tuple(entry["totals"])
    return None


def build_as_fit(model: keras.Model, batch: tuple[object, ...]) -> None:
    """Builds what ``fit`` builds before its first step: the model, its losses and metrics, and its
    optimizer. Computes nothing.

    Args:
        batch: some records: inputs, labels and maybe sample weights, as arrays or tensors.
    """
    # Keras knows no type of an array of strings.
    model._symbolic_build(data_batch=map_arrays(as_tensor, batch))


def merged_metrics(model: keras.Model, totals: Sequence[float]) -> dict[str, float]:
    """Returns loss and metrics of training under the names and in the order of the logs that
    ``keras.Model.fit`` gives to ``on_epoch_end``. The model's own metrics have these results then.
    Where metrics are too large for totals, there is the loss alone.

    Args:
        model: compiled, with its metrics built, see :func:`build_as_fit`.
        totals: a row of :func:`totals`.

    Raises:
        InvalidJob: the model's metrics are others than those of the job.
    """
    total, count, *states = totals
    loss = {"loss": total / count if count else math.nan}
    for variable, value in zip(model._loss_tracker.variables, totals[:LOSS], strict=True):
        variable.assign(value)
    if not states:
        return loss
    own = [*loss_trackers(model), *layer_metrics(model), model._compile_metrics]
    variables = [v for metric in own if metric is not None for v in metric.variables]
    ends = list(accumulate((math.prod(v.shape) for v in variables), initial=0))
    if ends[-1] != len(states):
        raise InvalidJob(
            f"the job's metrics have {len(states)} numbers, and the model's {ends[-1]}; compile "
            "the model as it was when fit was called"
        )
    for variable, start, stop in zip(variables, ends, ends[1:], strict=False):
        variable.assign(np.reshape(states[start:stop], variable.shape))
    logs: dict[str, float] = pythonify_logs({**model.get_metrics_result(), **loss})
    return logs
