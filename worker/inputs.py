"""Does the data fit what the model takes? Asked before TensorFlow answers, which names neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from psrpc.errors import InvalidJob
from worker.ragged import Ragged


def check_inputs(model: Any, x: Any) -> None:
    """Refuses text for inputs of numbers, numbers for inputs of text, and fractions for inputs of
    whole numbers, which Keras would cut off. A model whose inputs are not declared takes anything.

    Args:
        model: a ``keras.Model`` or a ``tf.Module``.
        x: a few records: arrays, in a dict, a list or a tuple where there are several inputs.

    Raises:
        InvalidJob: names the input and both dtypes.
    """
    for declared, given in _matched(getattr(model, "inputs", None) or [], x):
        array = given.values if isinstance(given, Ragged) else given
        text = array.dtype.kind in "SUO"
        dtype, has = str(array.dtype), str(array.dtype)
        if text and declared.dtype != "string":
            dtype, has = "string", f"text, {array.reshape(-1)[:1].tolist()}"
        elif "int" in declared.dtype and array.dtype.kind == "f":
            cut = array[array != np.trunc(array)]
            if not cut.size:
                continue
            has = f"{dtype}, {cut[:1].tolist()}"
        elif text or declared.dtype != "string":
            continue
        raise InvalidJob(
            f"the model's input {declared.name!r} takes {declared.dtype}, and the data has {has}; "
            f'say keras.Input(..., dtype="{dtype}", name="{declared.name}"), or change the data'
        )


def _matched(inputs: list[Any], x: Any) -> Iterator[tuple[Any, Any]]:
    """Inputs and their arrays, as far as it is clear which belong together."""
    if isinstance(x, Mapping):
        yield from ((declared, x[declared.name]) for declared in inputs if declared.name in x)
    else:
        arrays = x if isinstance(x, list | tuple) else [x]
        if len(arrays) == len(inputs):
            yield from zip(inputs, arrays, strict=True)
