"""The kinds of data that workers can read, and those that they cannot."""

from __future__ import annotations

import sys
from typing import Any, Literal

import keras

from psrpc.core.errors import InvalidData, InvalidSetting
from worker.job import checks

Kind = Literal["arrays", "py_dataset", "dataset", "source"]

_NOT_HERE = "pass a keras.utils.PyDataset, which workers read by index, or arrays"


def data_kind(name: str, x: Any) -> Kind:
    """Returns how workers read ``x``.

    Raises:
        InvalidData: they cannot; says what to pass instead.
    """
    mro = [(base.__module__, base.__name__) for base in type(x).__mro__]
    if x is None:
        raise InvalidData(f"{name} is None; expected data")
    if isinstance(x, keras.utils.PyDataset):
        return "py_dataset"
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        if isinstance(x, tf.data.Dataset):
            return "dataset"
        if isinstance(x, tf.distribute.DistributedDataset):
            raise InvalidData(
                f"{name} is a distributed dataset of a tf.distribute strategy; pass the dataset "
                "it was made of: workers divide its batches"
            )
    if is_source(x):
        return "source"
    if any(n == "DataLoader" and m.startswith("torch.") for m, n in mro):
        raise InvalidData(f"{name} is a torch DataLoader, which has no batch by index; {_NOT_HERE}")
    if any(m.split(".")[0] == "grain" for m, _ in mro):
        raise InvalidData(f"{name} is a {type(x).__name__} of grain, not of Keras; {_NOT_HERE}")
    if hasattr(x, "__next__"):
        raise InvalidData(
            f"{name} is a {type(x).__name__}, which one process alone can read, "
            f"and once; {_NOT_HERE}"
        )
    if callable(x) and not hasattr(x, "__array__"):
        raise InvalidData(f"{name} is {checks.show(x)}, to be called; {_NOT_HERE}")
    return "arrays"


def is_source(value: object) -> bool:
    """Whether ``value`` is a data source of the project (``worker.data.source``)."""
    try:
        checks.check_source("x", value)
    except InvalidSetting:
        return False
    return True


def check_ends(name: str, dataset: Any) -> None:
    """Refuses a ``tf.data.Dataset`` without an end, or without a batch, as far as it tells."""
    import tensorflow as tf

    size = int(dataset.cardinality())
    if size == tf.data.INFINITE_CARDINALITY:
        raise InvalidData(
            f"{name} is an endless tf.data.Dataset; end it with .take(n), n batches, or leave "
            ".repeat() out"
        )
    if not size:
        raise InvalidData(f"{name} is a tf.data.Dataset of 0 batches; expected at least one")
