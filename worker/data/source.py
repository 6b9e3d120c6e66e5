"""The interface of all data sources.

A batch is a tuple ``(x, y)`` or ``(x, y, sample_weight)``. Each part is an array or a
:class:`worker.data.ragged.Ragged`, or a dict, list or tuple of them, whose first axis counts the
records. Sources open their files on first use, which keeps job files cheap to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from psrpc.core.text import counted
from worker.data.ragged import in_numpy, joined

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = tuple[Any, ...]
"""``(x, y)`` or ``(x, y, sample_weight)``: C-contiguous arrays and ``Ragged``, nested in
any way."""

NO_LABELS: tuple[()] = ()
"""``y`` of a batch without labels, for a model that computes its loss without them."""

Map: TypeAlias = Callable[..., Batch]
"""``f(x, y)`` or ``f(x, y, sample_weight)``: returns a batch with as many records as it gets."""


class DataSource(Protocol):
    """Records in a seeded order. Thread-safe, because a trainer reads ahead in another thread.

    A source may also have ``record_name(seed, epoch, position)``, which names the record at a
    position of an epoch for error messages, such as ``"line 7 of 'x.csv'"``, and ``quick``, whether
    reading all ranges costs little, so that every label is checked before training.
    """

    @property
    def num_records(self) -> int:
        """The number of records; opens the source if necessary."""

    def read(self, seed: int, batch: BatchId) -> Batch:
        """Returns the records at the positions of ``batch`` in its epoch's seeded order.

        Every record has exactly one position in an epoch. The same arguments give the same records
        in every process.

        Raises:
            InvalidJob: positions lie outside the data, or the data is not as declared.
        """

    def read_range(self, start: int, stop: int) -> Batch:
        """Returns records ``[start, stop)`` in the order of the source, for evaluation."""

    def fingerprint(self) -> str:
        """Returns a short hash of the contents, equal on every machine. A run does not resume with
        data of another fingerprint. Takes well under a second for any size."""

    def close(self) -> None:
        """Releases files and memory; a later read opens the source again."""


_T = TypeVar("_T")


def map_arrays(function: Callable[[Any], _T], nest: Any) -> Any:
    """Returns ``nest`` with ``function`` applied to each array in its dicts, lists and tuples."""
    if isinstance(nest, dict):
        return {key: map_arrays(function, value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)([map_arrays(function, value) for value in nest])
    return function(nest)


def arrays_of(nest: Any) -> Iterator[Any]:
    """Yields the arrays and :class:`Ragged <worker.data.ragged.Ragged>` of a nest in a fixed
    order."""
    if isinstance(nest, dict):
        for key in sorted(nest):
            yield from arrays_of(nest[key])
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from arrays_of(value)
    else:
        yield nest


def named_arrays(name: str, nest: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a nest, each with its path in it, such as ``x['user'][0]``."""
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield from named_arrays(f"{name}[{key!r}]", value)
    elif isinstance(nest, list | tuple):
        for index, value in enumerate(nest):
            yield from named_arrays(f"{name}[{index}]", value)
    else:
        yield name, nest


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Joins batches of equal structure end to end; a single one stays as it is."""
    batch: Batch = batches[0] if len(batches) == 1 else _concatenated(batches)
    return batch


def _concatenated(nests: Sequence[Any]) -> Any:
    head = nests[0]
    if isinstance(head, dict):
        return {key: _concatenated([nest[key] for nest in nests]) for key in head}
    if isinstance(head, list | tuple):
        return type(head)([_concatenated(values) for values in zip(*nests, strict=True)])
    return joined(nests)


def check_range(name: str, first: int, stop: int, records: int) -> None:
    """Refuses ``[first, stop)`` unless it lies within ``records`` records."""
    if not 0 <= first < stop <= records:
        raise InvalidData(
            f"{name} has {counted(records, 'record')}; [{first}, {stop}) is not a part of them"
        )


def check_count(name: str, batch: object, expected: int) -> Batch:
    """Returns ``batch`` in NumPy; refuses it unless it has ``expected`` records. ``name`` is its
    producer, for messages."""
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        shape = counted(len(batch), "part") if isinstance(batch, tuple) else type(batch).__name__
        raise InvalidData(f"{name} gave {shape}; expected (x, y) or (x, y, sample_weight)")
    checked: Batch = map_arrays(in_numpy, batch)
    for array in arrays_of(checked):
        count = np.shape(array)[0] if np.ndim(array) else None
        if count != expected:
            raise InvalidData(
                f"{name} gave {'a scalar' if count is None else counted(count, 'record')}; "
                f"it was asked for {expected}"
            )
    return checked


def weighed(batch: Batch, class_weight: Mapping[int, float] | None) -> Batch:
    """Adds sample weights to a batch ``(x, y)``, in NumPy: the weight of each class, 1 by default.

    The class is the label ``[n]`` or ``[n, 1]``, rounded, or the argmax of ``[n, classes]``.
    Without ``class_weight`` the batch stays as it is.

    Raises:
        InvalidData: the batch has weights already, or labels without one class per record.
    """
    if class_weight is None:
        return batch
    if len(batch) > 2:
        raise InvalidData(
            "class_weight is given, but the records have weights of their own; leave one out, or "
            "multiply them (map)"
        )
    classes = _classes(batch[1])
    weights = np.ones(len(classes), np.float32)
    for each, weight in class_weight.items():
        weights[classes == each] = weight
    return (*batch, weights)


def _classes(labels: Any) -> Array:
    """Returns the classes ``[n]``, int64."""
    labels = map_arrays(in_numpy, labels)
    if not isinstance(labels, np.ndarray):
        kind = "several outputs" if isinstance(labels, dict | list | tuple) else "ragged labels"
        raise InvalidData(
            f"class_weight is given, but the model has {kind}; it needs one class for each record: "
            "give sample weights"
        )
    if labels.dtype.kind not in "biuf" or labels.ndim > 2:
        raise InvalidData(
            f"class_weight is given, but labels are {labels.dtype} of shape {list(labels.shape)}; "
            "it needs one class for each record: give sample weights"
        )
    if labels.ndim == 2:
        labels = labels[:, 0] if labels.shape[1] == 1 else labels.argmax(axis=1)
    classes: Array = np.round(labels.astype(np.float64)).astype(np.int64)
    return classes
