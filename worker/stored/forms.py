"""The forms of data that ``model.fit`` takes, as NumPy arrays and ``Ragged``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from psrpc.core.errors import InvalidData
from psrpc.core.text import counted
from worker.data.ragged import Ragged, in_numpy
from worker.data.source import NO_LABELS, named_arrays
from worker.job.checks import show


def in_arrays(name: str, nest: Any) -> Any:
    """Returns ``nest`` in arrays ``[records, ...]`` and ``Ragged``, in dicts, lists and tuples.

    Converts as Keras does: a pandas Series becomes ``[records, 1]``, a DataFrame ``[records,
    columns]``. Copies neither arrays nor the values of tensors. Strings stay objects.

    Raises:
        InvalidData: names the part, its type and the form to convert it to.
    """
    if isinstance(nest, Mapping):
        for key in nest:
            if not isinstance(key, str):
                raise InvalidData(f"{name} has the key {show(key)}; expected names, as str")
        return {key: in_arrays(f"{name}[{key!r}]", each) for key, each in nest.items()}
    if isinstance(nest, list | tuple):
        kind = list if isinstance(nest, list) else tuple
        return kind([in_arrays(f"{name}[{i}]", each) for i, each in enumerate(nest)])
    return _array(name, nest)


def _array(name: str, value: Any) -> Any:
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if is_sparse(value):
        raise InvalidData(
            f"{name} is sparse ({kind}); expected a dense array: give .toarray() of a matrix, "
            "tf.sparse.to_dense of a tensor"
        )
    if not (isinstance(value, Ragged) or _is_ragged(value) or hasattr(value, "__array__")):
        raise InvalidData(
            f"{name} is {show(value)}; expected an array, as Keras does: np.array(...) makes one "
            "of a list of numbers"
        )
    array: Any = _plain(value)
    if not isinstance(array, Ragged):
        series = type(array).__module__.split(".")[0] == "pandas" and array.ndim == 1
        try:
            array = np.asarray(array)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InvalidData(
                f"{name} is {show(value)}; expected an array: {str(error).splitlines()[0]}"
            ) from None
        if series:
            array = array[:, np.newaxis]
    if not array.ndim:
        raise InvalidData(f"{name} is a scalar, {show(array.item())}; expected one row per record")
    _check_values(name, array)
    return array


def is_sparse(value: object) -> bool:
    """Whether ``value`` is a sparse tensor or a matrix of SciPy, judged without importing it."""
    return any(
        base.__name__ in ("SparseTensor", "IndexedSlices") or base.__module__.startswith("scipy.")
        for base in type(value).__mro__
    )


def _is_ragged(value: object) -> bool:
    return type(value).__name__ == "RaggedTensor"


def _plain(value: Any) -> Any:
    """Converts as :func:`in_numpy`, but does not copy a dense tensor of numbers: returns a view."""
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        if isinstance(value, tf.Tensor) and value.dtype.is_numpy_compatible:
            try:
                return np.asarray(memoryview(value))
            except (TypeError, ValueError, BufferError, NotImplementedError):
                pass  # strings, bfloat16, or on a device
    return in_numpy(value)


def _check_values(name: str, array: Any) -> None:
    """Refuses values that are neither numbers nor strings."""
    values = array.values if isinstance(array, Ragged) else array
    if values.dtype.hasobject:
        for index, one in zip(np.ndindex(values.shape), values.flat, strict=True):
            if not isinstance(one, str | bytes):
                raise InvalidData(
                    f"{name} has dtype object, with {show(one)} at {list(index)}; expected numbers "
                    "of one dtype (astype) or strings alone (fillna)"
                )
    elif values.dtype.kind not in "biufcSU" and values.dtype.name != "bfloat16":
        raise InvalidData(f"{name} has dtype {values.dtype}; expected numbers or strings")


def check_lengths(parts: Mapping[str, Any]) -> int:
    """Returns the number of records of the nests of arrays in ``parts``.

    Raises:
        InvalidData: they differ, or there is none; names all arrays.
    """
    arrays = list(_named(parts))
    lengths = {len(array) for _, array in arrays}
    if not arrays:
        raise InvalidData(f"{' and '.join(parts)} have no array; expected at least one")
    if len(lengths) != 1:
        each = ", ".join(f"{name} has {counted(len(array), 'record')}" for name, array in arrays)
        raise InvalidData(f"data of different lengths: {each}; expected one row per record")
    (records,) = lengths
    if not records:
        raise InvalidData(f"{arrays[0][0]} has 0 records; expected at least one")
    return records


def _named(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, nest in parts.items():
        yield from named_arrays(name, nest)


def unpacked(producer: str, batch: Any) -> tuple[Any, Any, Any]:
    """Returns ``(x, y, sample_weight)`` of what Keras takes: ``x``, ``(x,)``, ``(x, y)`` or
    ``(x, y, sample_weight)``. Without labels y is :data:`NO_LABELS`, without weights they are None.

    Raises:
        InvalidData: it has more parts; ``producer`` made it.
    """
    parts = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise InvalidData(
            f"{producer} has {counted(len(parts), 'part')}; expected x, (x, y) or (x, y, "
            "sample_weight): several inputs are a tuple or a dict in x"
        )
    x, y, weight = (*parts, None, None)[:3]
    return x, NO_LABELS if y is None else y, weight


def as_batch(producer: str, batch: Any) -> tuple[Any, ...]:
    """Converts a batch, in a form that Keras takes, to ``(x, y)`` or ``(x, y, sample_weight)`` in
    arrays.

    Raises:
        InvalidData: as :func:`unpacked`, :func:`in_arrays` and :func:`check_lengths`.
    """
    x, y, weight = unpacked(producer, batch)
    named = {"x": x, "y": y} if weight is None else {"x": x, "y": y, "sample_weight": weight}
    try:
        parts = {name: in_arrays(name, nest) for name, nest in named.items()}
        check_lengths(parts)
    except InvalidData as error:
        raise InvalidData(f"{producer}: {error}") from None
    return tuple(parts.values())
