"""Does the data fit what the model takes? Asked before TensorFlow answers, which names neither."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from psrpc.core.errors import InvalidJob
from psrpc.options.job_keys import UserCodeFailed
from worker.data.ragged import Ragged
from worker.job.loader import user_code
from worker.job.output_names import listed


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


def check_input_names(model: Any, x: Any) -> None:
    """Refuses data that leaves out an input of a model, of one that declares them.

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
    # One array in a dict is taken for the only input, whatever its key.
    if missing and not (len(names) == len(x) == 1):
        raise InvalidJob(
            f"x of the data has no {missing[0]!r}; its keys are {listed(x)}, and the inputs of the "
            f"model are {listed(names)}"
        )


def _optional(declared: Any) -> bool:
    history = getattr(declared, "_keras_history", None)
    return bool(getattr(getattr(history, "operation", None), "optional", False))


@contextmanager
def calling(model: Any, x: Any, of: str = "") -> Iterator[None]:
    """As ``user_code("the model")``, and says which shape of ``x`` is not that of its input.

    Args:
        model: a ``keras.Model`` that is called within the block.
        x: a few records, as in :func:`check_inputs`.
        of: where they are from, if not from the training data.
    """
    try:
        with user_code(f"the model, called with data of {of}," if of else "the model"):
            yield
    except UserCodeFailed as error:
        found = "".join(_other_shapes(model, x))
        raise UserCodeFailed(f"{error}{found}{_ragged(x)}", error.user_traceback) from None


@contextmanager
def first_call(x: Any) -> Iterator[None]:
    """As :func:`calling`, of a model that has not said yet what its inputs are."""
    try:
        with user_code("the first call of the model"):
            yield
    except UserCodeFailed as error:
        raise UserCodeFailed(f"{error}{_ragged(x)}", error.user_traceback) from None


def _ragged(x: Any) -> str:
    """Names inputs whose records differ in length, which few layers take; empty if none do."""
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
            yield f"; {part} of the data has shape {_shown(has)}, the input takes {_shown(takes)}"


def _shown(shape: Sequence[int | None]) -> str:
    """Of records, as ``[n, 8]``."""
    return f"[{', '.join(['n', *('any' if each is None else str(each) for each in shape)])}]"


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
    """Inputs and their arrays, those of the values of what is ragged."""
    for declared, given in _pairs(inputs, x):
        yield declared, given.values if isinstance(given, Ragged) else given


def _pairs(inputs: Sequence[Any], x: Any) -> Iterator[tuple[Any, Any]]:
    """Inputs and their data, as far as it is clear which belong together."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(x, Mapping):
        pairs = ((declared, x[declared.name]) for declared in inputs if declared.name in x)
    else:
        arrays = x if isinstance(x, list | tuple) else [x]
        if len(arrays) == len(inputs):
            pairs = zip(inputs, arrays, strict=True)
    yield from pairs
