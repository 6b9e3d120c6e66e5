"""Checks that data fits a model's inputs, since TensorFlow's errors name neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from psrpc.core.errors import InvalidJob
from psrpc.options.job_keys import UserCodeFailed
from worker.data.ragged import Ragged
from worker.job.loader import user_code
from worker.job.output_names import as_list, shown_shape


def check_inputs(model: Any, x: Any) -> None:
    """Refuses text for inputs of numbers, numbers for inputs of text, and fractions as
    :func:`check_whole_numbers` does. A model without declared inputs takes anything.

    Args:
        model: a ``keras.Model`` or a ``tf.Module``.
        x: a few records: an array, or a dict, list or tuple of them for several inputs.

    Raises:
        InvalidJob: names the input and both dtypes.
    """
    for declared, array in _matched(getattr(model, "inputs", None) or [], x):
        text = array.dtype.kind in "SUO"
        dtype, has = str(array.dtype), str(array.dtype)
        if text and declared.dtype != "string":
            dtype, has = "string", f"text, {array.reshape(-1)[:1].tolist()}"
        elif text or declared.dtype != "string":
            continue
        raise InvalidJob(
            f"the model's input {declared.name!r} takes {declared.dtype}, and the data has {has}; "
            f'say keras.Input(..., dtype="{dtype}", name="{declared.name}"), or change the data'
        )
    check_whole_numbers(whole_inputs(model), x)


def check_input_names(model: Any, x: Any) -> None:
    """Refuses data that leaves out a declared input of a model.

    Args:
        model: a ``keras.Model`` or a ``tf.Module``.
        x: a few records, as in :func:`check_inputs`.

    Raises:
        InvalidJob: names the inputs, and the keys that the data has.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs or not isinstance(x, Mapping) or any(map(_optional, inputs)):
        return
    struct = getattr(model, "input", None)
    names = list(struct) if isinstance(struct, Mapping) else [each.name for each in inputs]
    missing = [name for name in names if name not in x]
    # A single array in a dict fits a single input under any key.
    if missing and not (len(names) == len(x) == 1):
        raise InvalidJob(
            f"x of the data has no {missing[0]!r}; its keys are {as_list(x)}, and the inputs of"
            f" the model are {as_list(names)}"
        )


def _optional(declared: Any) -> bool:
    history = getattr(declared, "_keras_history", None)
    return bool(getattr(getattr(history, "operation", None), "optional", False))


@contextmanager
def calling(model: Any, x: Any, of: str = "") -> Iterator[None]:
    """Reports errors as ``user_code("the model")`` does, and adds which part of ``x`` has another
    shape than its input.

    Args:
        model: a ``keras.Model`` that the block calls.
        x: a few records, as in :func:`check_inputs`.
        of: the origin of the records, if not the training data.
    """
    try:
        with user_code(f"the model, called with data of {of}," if of else "the model"):
            yield
    except UserCodeFailed as error:
        shapes = "".join(_other_shapes(model, x))
        raise UserCodeFailed(f"{error}{shapes}{_ragged(x)}", error.user_traceback) from None


@contextmanager
def first_call(x: Any) -> Iterator[None]:
    """Reports errors as :func:`calling` does, for a model that has not declared its inputs yet."""
    try:
        with user_code("the first call of the model"):
            yield
    except UserCodeFailed as error:
        raise UserCodeFailed(f"{error}{_ragged(x)}", error.user_traceback) from None


def _ragged(x: Any) -> str:
    """Names inputs whose records differ in length, which few layers accept; empty if none."""
    nest = x if isinstance(x, list | tuple) else ()
    named = x.items() if isinstance(x, Mapping) else enumerate(nest)
    parts = [f"x[{name!r}]" for name, part in named if isinstance(part, Ragged)]
    parts += ["x"] if isinstance(x, Ragged) else []
    if not parts:
        return ""
    return (
        f"; {', '.join(parts)} of the data {'is' if len(parts) == 1 else 'are'} ragged, which "
        "worker.Embedding takes and most layers of Keras, such as LSTM, do not: give ids to a "
        "worker.Embedding with a combiner, or pad records to one length in map= of the data source "
        "(docs/embeddings.md)"
    )


def _other_shapes(model: Any, x: Any) -> Iterator[str]:
    for declared, array in _pairs(getattr(model, "inputs", None) or [], x):
        takes, has = declared.shape[1:], array.shape[1:]
        pairs = zip(takes, has, strict=False)
        if len(takes) != len(has) or any(a not in (None, b) for a, b in pairs):
            part = f"x[{declared.name!r}]" if isinstance(x, Mapping) else "x"
            shapes = f"shape {shown_shape(has)}, the input takes {shown_shape(takes)}"
            yield f"; {part} of the data has {shapes}"


def whole_inputs(model: Any) -> Sequence[Any]:
    """Returns the declared inputs of a model if one of them takes whole numbers, else none."""
    inputs = getattr(model, "inputs", None) or []
    return inputs if any("int" in declared.dtype for declared in inputs) else []


def check_whole_numbers(inputs: Sequence[Any], x: Any) -> None:
    """Refuses fractions, NaN and infinities for ``inputs`` of whole numbers: Keras would truncate
    them, and train another id.

    Args:
        inputs: the result of :func:`whole_inputs`.
        x: one or more records, as in :func:`check_inputs`.

    Raises:
        InvalidJob: names the input, both dtypes, and a value.
    """
    for declared, array in _matched(inputs, x):
        if "int" not in declared.dtype or array.dtype.kind != "f":
            continue
        bad = array[~(np.isfinite(array) & (array == np.trunc(array)))]
        if bad.size:
            raise InvalidJob(
                f"the model's input {declared.name!r} takes {declared.dtype}, and the data has "
                f"{array.dtype}, {bad[:1].tolist()}; change the data (a missing value makes whole "
                "numbers float), or, if they are no ids, say "
                f'keras.Input(..., dtype="{array.dtype}", name="{declared.name}")'
            )


def _matched(inputs: Sequence[Any], x: Any) -> Iterator[tuple[Any, Any]]:
    """Yields inputs and their arrays; for ragged data the array of values."""
    for declared, given in _pairs(inputs, x):
        yield declared, given.values if isinstance(given, Ragged) else given


def _pairs(inputs: Sequence[Any], x: Any) -> Iterator[tuple[Any, Any]]:
    """Yields inputs and their data, if it is clear which belong together."""
    if isinstance(x, Mapping):
        yield from ((declared, x[declared.name]) for declared in inputs if declared.name in x)
        return
    arrays = x if isinstance(x, list | tuple) else [x]
    if len(arrays) == len(inputs):
        yield from zip(inputs, arrays, strict=True)
