"""Checks that labels and sample weights fit the loss, before training gives a NaN or a crash."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np

from psrpc.core.errors import InvalidJob
from psrpc.options.job_keys import UserCodeFailed
from worker.data.arrays import Arrays, Npz
from worker.data.source import Array, DataSource
from worker.job.job import Loss
from worker.job.loader import user_code

_SCANNED_AT_ONCE = 8192
_SPARSE = "sparse_categorical_crossentropy"
_GENERALIZED = "categorical_generalized_cross_entropy"
"""A loss that also takes classes, but broadcasts labels ``[n, 1]`` to one output per record."""
_CLASSES = (_SPARSE, _GENERALIZED)
_HINTS = {
    "categorical_crossentropy": f"integer class labels need {_SPARSE}",
    _SPARSE: "one-hot labels need categorical_crossentropy",
    _GENERALIZED: "it takes a class for each record, [n]",
}


def check_labels(
    source: DataSource | None, loss: Loss, example: Array, outputs: tuple[int, ...]
) -> None:
    """Refuses labels whose kind, shape or values a built-in Keras loss cannot use. Checks every
    label of a source in memory, else only ``example``. A user's own function takes anything.

    Args:
        example: some labels ``[n, ...]``.
        outputs: shape of the model's output for one example.

    Raises:
        InvalidJob: names the loss, the shapes or the first bad label.
    """
    if example.dtype.kind in "SUO" and _is_built_in(loss):
        found = example.reshape(-1)[:1].tolist()
        raise InvalidJob(
            f"labels are text, such as {_text(found[0]) if found else ''!r}, and the loss takes "
            "numbers; number the classes beforehand, as with "
            "classes, y = np.unique(labels, return_inverse=True)"
        )
    kind = loss_name(loss)
    if kind is None:
        return
    shape = example.shape[1:]
    expected = outputs[:-1] if kind in _CLASSES else outputs
    fits = _squeezed(shape) == _squeezed(expected)
    if kind == _GENERALIZED:
        fits = shape == expected
    if not fits or (kind in _CLASSES and not outputs):
        hint = f"; {_HINTS[kind]}" if kind in _HINTS else ""
        raise InvalidJob(
            f"labels of shape {shape} per example do not fit the loss {kind} and a model "
            f"whose output has shape {outputs}; expected labels of shape {expected}{hint}"
        )
    if kind in _CLASSES:
        ignored = getattr(loss, "ignore_class", None)
        for first, labels in _labels(source, example):
            _check_classes(kind, first, labels, outputs[-1], ignored)


def check_labels_by_output(
    losses: Mapping[Any, Loss | None], labels: Mapping[Any, Any], outputs: Mapping[Any, Any]
) -> None:
    """Checks a few records as :func:`check_labels` does, for a model with several outputs. All
    arguments are by the name of the output."""
    _check_by_output(partial(check_labels, None), losses, labels, outputs)


def _check_by_output(
    check: Callable[[Loss, Array, tuple[int, ...]], None],
    losses: Mapping[Any, Loss | None],
    arrays: Mapping[Any, Any],
    outputs: Mapping[Any, Any],
) -> None:
    for name, loss in losses.items():
        array, output = arrays.get(name), outputs.get(name)
        shape = None if output is None else output_shape(output)
        if loss is None or shape is None or not isinstance(array, np.ndarray):
            continue
        try:
            check(loss, array, shape)
        except InvalidJob as error:
            raise InvalidJob(f"output {name!r}: {error}") from None


@contextmanager
def naming_losses(losses: Mapping[Any, Any]) -> Iterator[None]:
    """Reports errors as ``user_code`` does, and adds the loss of each output to the message."""
    try:
        with user_code("the loss"):
            yield
    except UserCodeFailed as error:
        if not losses:
            raise
        each = ", ".join(f"{name!r} has {_called(loss)}" for name, loss in losses.items())
        raise UserCodeFailed(
            f"{error}; of the outputs {each} (a list goes by the sorted names of outputs in a "
            "dict)",
            error.user_traceback,
        ) from None


def _called(loss: Any) -> str:
    if isinstance(loss, str):
        return loss
    return getattr(loss, "__name__", None) or getattr(loss, "name", None) or type(loss).__name__


def check_weights(loss: Loss | None, weights: Array, outputs: tuple[int, ...]) -> None:
    """Refuses sample weights that Keras cannot multiply with the values of a built-in loss. Those
    values have the shape of the output without its last axis.

    Args:
        weights: some weights ``[n, ...]``.
        outputs: as in :func:`check_labels`.

    Raises:
        InvalidJob: names the loss, both shapes and the expected one.
    """
    kind = None if loss is None else loss_name(loss)
    if kind is None or kind in _OF_WHOLE_BATCH or not outputs:
        return
    values, given = outputs[:-1], weights.shape[1:]
    if _multiplied(values, given):
        return
    each, whole = _axes((1,) * len(values)), _axes(values)
    expected = each if each == whole else f"{each}, one for each record, or {whole}"
    raise InvalidJob(
        f"sample weights of shape {_axes(given)} do not fit the loss {kind}, which has shape "
        f"{whole} for a model whose output has shape {_axes(outputs)}; expected {expected}"
    )


def check_weights_by_output(
    losses: Mapping[Any, Loss | None], weights: Mapping[Any, Any], outputs: Mapping[Any, Any]
) -> None:
    """Checks weights as :func:`check_weights` does, for a model with several outputs. All arguments
    are by the name of the output."""
    _check_by_output(check_weights, losses, weights, outputs)


_OF_WHOLE_BATCH = ("dice", "tversky")
"""Losses that give one value for a whole batch, or have their own axes."""


def _multiplied(values: tuple[int, ...], weights: tuple[int, ...]) -> bool:
    """Whether Keras multiplies values and weights of these shapes record by record; it adds or
    removes a last axis of 1 if one has an axis more."""
    longer, shorter = sorted((values, weights), key=len, reverse=True)
    if len(longer) == len(shorter) + 1 and longer[-1] == 1:
        longer = longer[:-1]
    # Other shapes would broadcast over records if their sizes happen to match.
    return len(longer) == len(shorter) and all(
        1 in pair or pair[0] == pair[1] for pair in zip(longer, shorter, strict=True)
    )


def _axes(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(['n', *map(str, shape)])}]"


def _text(label: Any) -> str:
    return label.decode(errors="replace") if isinstance(label, bytes) else str(label)


def _is_built_in(loss: Loss | None) -> bool:
    return isinstance(loss, str) or any(
        getattr(each, "__module__", "").startswith("keras.") for each in (loss, type(loss))
    )


def _check_classes(
    kind: str, first: int | None, labels: Array, classes: int, ignored: int | None
) -> None:
    """Refuses labels that are no whole numbers below ``classes``, except ``ignored``. ``first`` is
    the number of the first record among ``labels``, if known."""
    wrong = ~((labels >= 0) & (labels < classes) & (labels == np.floor(labels)))
    if ignored is not None:
        wrong &= labels != ignored
    if wrong.any():
        at = int(np.flatnonzero(wrong.reshape(len(labels), -1).any(axis=1))[0])
        record = "a record" if first is None else f"record {first + at}"
        raise InvalidJob(
            f"{record} has label {labels[wrong].flat[0]}; {kind} with a model of {classes} "
            f"outputs takes whole numbers from 0 to {classes - 1}"
        )


def _labels(source: DataSource | None, example: Array) -> Iterator[tuple[int | None, Array]]:
    if source is None or not (isinstance(source, Arrays | Npz) or getattr(source, "quick", False)):
        yield None, example
        return
    for start in range(0, source.num_records, _SCANNED_AT_ONCE):
        stop = min(start + _SCANNED_AT_ONCE, source.num_records)
        yield start, np.asarray(source.read_range(start, stop)[1])


def loss_name(loss: Loss) -> str | None:
    """Returns Keras's name of a built-in loss; None for a user's own, and for losses with special
    label shapes."""
    if isinstance(loss, str):
        if loss.lower() in ("crossentropy", "ce"):
            return None  # depends on the labels
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            return None  # calling the loss reports it
    if type(loss).__module__.startswith("keras."):
        name = type(loss).__name__
    elif getattr(loss, "__module__", "").startswith("keras."):
        name = getattr(loss, "__name__", "")
    else:
        return None
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return None if snake in _OF_OTHER_SHAPES else snake


_OF_OTHER_SHAPES = ("circle", "cosine_similarity", "ctc")
"""Losses with their own rules of shape: the labels of a circle loss number embeddings."""


@contextmanager
def counting(
    metric: str, labels: Any, outputs: Any, by_output: Mapping[Any, Any] | None = None
) -> Iterator[None]:
    """Reports errors as ``user_code`` does, and adds the name of the metric and the shapes that it
    got to the message.

    Args:
        labels: the labels of a few records.
        outputs: the outputs of the model for them.
        by_output: the metrics of each output, if there are several.
    """
    try:
        with user_code(f"metric {metric}"):
            yield
    except UserCodeFailed as error:
        text = str(error)
        if by_output:
            which = ", ".join(f"{name!r} has {_list(given)}" for name, given in by_output.items())
            text = f"{error}; of the outputs {which} (a list goes by the sorted names of outputs)"
        raise UserCodeFailed(
            f"{text}; labels have shape {_shapes(labels)}, the output {_shapes(outputs)}: metrics "
            "take labels of the output's shape; classes as whole numbers, one for each record, "
            "fit accuracy and those that begin with sparse_",
            error.user_traceback,
        ) from None


def _list(metrics: Any) -> str:
    if metrics is None:
        return "none"
    given = metrics if isinstance(metrics, list | tuple) else [metrics]
    return f"[{', '.join(map(_called, given))}]"


def _shapes(nest: Any) -> str:
    """Formats the shapes of records, as ``[n, 3]``; those of a nest by key."""
    if isinstance(nest, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shapes(each)}' for key, each in nest.items())}}}"
    if isinstance(nest, list | tuple):
        return f"({', '.join(map(_shapes, nest))})"
    if getattr(nest.shape, "rank", 0) is None:
        return "unknown"
    return _axes(nest.shape[1:])


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Removes a last axis of 1, which Keras adds and removes as needed."""
    return shape[:-1] if shape and shape[-1] == 1 else shape


def output_shape(outputs: Any) -> tuple[int, ...] | None:
    """Returns the shape per example of a model's only output; None for several."""
    return tuple(outputs.shape[1:]) if keras.ops.is_tensor(outputs) else None
