"""Writes the results of parts to files, reads them and joins them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from psrpc.core.errors import InvalidJob
from worker.stored.objects import load_object, save_object


def save_result(folder: Path, index: int, result: Any) -> None:
    """Writes the result of a part to a file, which appears at once as a whole and replaces that of
    an earlier try."""
    path = _path(folder, index)
    begun = path.with_name(f"{path.name}.{os.getpid()}")
    save_object(begun, result)
    begun.replace(path)


def result_is_there(folder: Path, index: int) -> bool:
    """Whether :func:`save_result` has written the result of a part."""
    return _path(folder, index).exists()


def load_result(folder: Path, index: int) -> Any:
    """Returns the result of a part. Large arrays are private memory maps of the file, and stay
    valid if it is removed."""
    return load_object(_path(folder, index))


def _path(folder: Path, index: int) -> Path:
    return folder / f"part-{index}.result"


def join_outputs(model: keras.Model, outputs: Sequence[Any]) -> Any:
    """Joins the results of ``keras.Model.predict`` for consecutive batches to the result of one
    call for all of them. They are nests of equal structure, of arrays or ragged or sparse tensors.
    Arrays whose shapes differ beyond the first axis become a ragged tensor."""
    flat = [keras.tree.flatten(each) for each in outputs]
    leaves = [_joined(list(parts)) for parts in zip(*flat, strict=True)]
    # A functional model that was written to a file has lists in place of tuples.
    like = getattr(model, "_outputs_struct", None)
    if len(keras.tree.flatten(like)) != len(leaves):
        like = outputs[0]
    return keras.tree.pack_sequence_as(like, leaves)


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        widest = np.max([each.dense_shape for each in parts], axis=0)
        whole = [tf.sparse.reset_shape(each, [each.dense_shape[0], *widest[1:]]) for each in parts]
        return tf.sparse.concat(0, whole)
    if all(isinstance(each, np.ndarray) for each in parts):
        if len({each.shape[1:] for each in parts}) == 1:
            return np.concatenate(parts)
        shapes = np.array([each.shape[1:] for each in parts])
        rank = 1 + int(np.flatnonzero((shapes != shapes[0]).any(0))[-1])
    else:
        rank = max(each.ragged_rank for each in parts if isinstance(each, tf.RaggedTensor))
    return tf.concat([_ragged(each, rank) for each in parts], axis=0)


def _ragged(part: Any, rank: int) -> tf.RaggedTensor:
    if isinstance(part, np.ndarray):
        return tf.RaggedTensor.from_tensor(part, ragged_rank=rank)
    return part


def metric_states(model: keras.Model) -> list[np.ndarray[Any, Any]]:
    """Returns the variables of all metrics, in the order of the model."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    return [np.asarray(variable.numpy()) for variable in variables]


def add_states(model: keras.Model, states: Sequence[np.ndarray[Any, Any]], *, first: bool) -> None:
    """Adds the states of a part to those of the model's metrics; those of the ``first`` part take
    their place.

    Raises:
        InvalidJob: the part has made other metrics.
    """
    variables = [variable for metric in model.metrics for variable in metric.variables]
    if [tuple(each.shape) for each in variables] != [each.shape for each in states]:
        raise InvalidJob(
            f"the metrics of {model.name!r} have {len(variables)} variables here, and "
            f"{len(states)} of other shapes where it is made again; make all metrics in compile() "
            "or in the __init__ of the model and its layers",
            code="PS108",
        )
    for variable, state in zip(variables, states, strict=True):
        variable.assign(state) if first else variable.assign_add(state)
