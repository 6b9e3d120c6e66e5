"""Does the data fit what the model takes? Asked before TensorFlow answers, which names neither."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from psrpc.errors import InvalidJob
from worker.ragged import Ragged


def check_inputs(model: Any, x: Any) -> None:
    """Refuses text for inputs of numbers, numbers for inputs of text, and what
    :func:`check_whole_numbers` does. A model whose inputs are not declared takes anything.

    Args:
        model: a ``keras.Model`` or a ``tf.Module``.
        x: a few records: arrays, in a dict, a list or a tuple where there are several inputs.

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


def whole_inputs(model: Any) -> Sequence[Any]:
    """The declared inputs of a model, if one of them takes whole numbers; otherwise none."""
    inputs = getattr(model, "inputs", None) or []
    return inputs if any("int" in declared.dtype for declared in inputs) else []


def check_whole_numbers(inputs: Sequence[Any], x: Any) -> None:
    """Refuses fractions, NaN and infinities for those of ``inputs`` that take whole numbers: Keras
    would cut them off, and train another id.

    Args:
        inputs: of a model, as :func:`whole_inputs` gives them.
        x: of one or more records, as in :func:`check_inputs`.

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
    """Inputs and their arrays, as far as it is clear which belong together."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(x, Mapping):
        pairs = ((declared, x[declared.name]) for declared in inputs if declared.name in x)
    else:
        arrays = x if isinstance(x, list | tuple) else [x]
        if len(arrays) == len(inputs):
            pairs = zip(inputs, arrays, strict=True)
    for declared, given in pairs:
        yield declared, given.values if isinstance(given, Ragged) else given
