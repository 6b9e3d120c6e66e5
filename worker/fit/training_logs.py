"""Loss and metrics of training, from the totals that a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.utils.python_utils import pythonify_logs

from psrpc.checkpoint.load import opened
from psrpc.checkpoint.manifest import read_manifest
from psrpc.core.batch import KEPT_VALUES, LOSS, MAX_VALUES
from psrpc.core.errors import InvalidJob
from psrpc.core.names import JOB
from psrpc.files.storage import DISK, read_json
from worker.data.ragged import as_tensor
from worker.data.source import map_arrays
from worker.embedding.lookups import NoRows, look_up
from worker.model.build import layer_metrics, loss_trackers


def totals(checkpoint: Path) -> dict[int, tuple[float, ...]]:
    """Returns the totals of each epoch, counted from 0, as of a checkpoint: sums over the batches
    that shard 0 has applied, see :mod:`psrpc.core.batch`. Shards leave batches out whose loss or
    gradient is not finite; the loss of an epoch with such a batch is NaN, as in ``fit``. Reads only
    the header of a file.

    Shards keep the totals of the newest epochs only, see :func:`kept_epochs`. Those of others are
    NaN as well.

    Raises:
        CheckpointError: it cannot be read.
    """
    manifest = read_manifest(checkpoint)
    (file,) = (file for file in manifest.files if file.shard == 0)
    found = {}
    with opened(checkpoint, manifest, file, DISK) as reader:
        for entry in reader.header.applied:
            row = tuple(entry.get("totals", ()))
            records = sum(stop - start for start, stop in entry["applied"])
            if not row or row[1] < records:
                row = (math.nan, float(records), *row[LOSS:])
            found[entry["epoch"]] = row
    return found


def kept_epochs(model: keras.Model) -> int:
    """Returns the number of epochs whose totals shards keep at least. The model's metrics must be
    built, see :func:`build_as_fit`."""
    return KEPT_VALUES // min(LOSS + _size(_counted(model)), MAX_VALUES)


def unsummed_metrics(run_dir: Path) -> frozenset[str]:
    """Returns the names of metrics whose states do not add up over batches, which therefore have
    no value of training data. Raises OSError or ValueError if the run has no description yet."""
    return frozenset(read_json(run_dir / JOB)["description"].get("unsummed_metrics", ()))


def build_as_fit(model: keras.Model, batch: tuple[object, ...]) -> None:
    """Builds what ``fit`` builds before its first step: the model, its losses and metrics, and its
    optimizer. Computes nothing.

    Args:
        batch: some records: inputs, labels and maybe sample weights, as arrays or tensors.
    """
    with look_up(NoRows()):
        # Keras knows no type of an array of strings.
        model._symbolic_build(data_batch=map_arrays(as_tensor, batch))


def merged_metrics(
    model: keras.Model, totals: Sequence[float], unsummed: Collection[str] = ()
) -> dict[str, float]:
    """Returns loss and metrics of training under the names and in the order of the logs that
    ``keras.Model.fit`` gives to ``on_epoch_end``. Also sets the model's own metrics to these
    results. If metrics are too large for totals, returns the loss alone.

    Args:
        model: compiled, with its metrics built, see :func:`build_as_fit`.
        totals: a row of :func:`totals`.
        unsummed: metrics to leave out, see :func:`unsummed_metrics`.

    Raises:
        InvalidJob: the model's metrics are others than those of the job.
    """
    total, count, *states = totals
    loss = {"loss": total / count if count else math.nan}
    for variable, value in zip(model._loss_tracker.variables, totals[:LOSS], strict=True):
        variable.assign(value)
    variables = _counted(model)
    if not states and math.isnan(total) and _size(variables) <= MAX_VALUES - LOSS:
        # No batch was counted.
        states = [0.0] * _size(variables)
    if not states:
        return loss
    ends = list(accumulate((math.prod(v.shape) for v in variables), initial=0))
    if ends[-1] != len(states):
        raise InvalidJob(
            f"the job's metrics have {len(states)} numbers, and the model's {ends[-1]}; compile "
            "the model as it was when fit was called"
        )
    for variable, start, stop in zip(variables, ends, ends[1:], strict=False):
        variable.assign(np.reshape(states[start:stop], variable.shape))
    results = {**model.get_metrics_result(), **loss}
    logs: dict[str, float] = pythonify_logs(
        {name: value for name, value in results.items() if name not in unsummed}
    )
    return logs


def _counted(model: keras.Model) -> list[Any]:
    """Returns the variables of the metrics whose states are in totals, in that order."""
    own = [*loss_trackers(model), *layer_metrics(model), model._compile_metrics]
    return [v for metric in own if metric is not None for v in metric.variables]


def _size(variables: Sequence[Any]) -> int:
    return sum(math.prod(variable.shape) for variable in variables)
