"""Where records come from: the interface of all data sources.

A batch is a tuple ``(x, y)`` or ``(x, y, sample_weight)``; each part is an array or a
:class:`worker.data.ragged.Ragged`, or a dict, list or tuple of them, whose first axis counts the
records. Sources open their files on first use,
not when they are made, so that a job file stays cheap to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidData
from psrpc.core.text import counted
from worker.data.ragged import in_numpy

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = tuple[Any, ...]
"""``(x, y)`` or ``(x, y, sample_weight)``: C-contiguous arrays and ``Ragged``, in nests of any
shape."""

Map: TypeAlias = Callable[..., Batch]
"""``f(x, y)`` or ``f(x, y, sample_weight)``: a batch of records in, as many records out."""


class DataSource(Protocol):
    """Records that can be read in a seeded order. Thread-safe: a trainer reads ahead of itself.

    A source may also have ``record_name(seed, epoch, position)``: what an error calls the record at
    a position of an epoch, such as ``"line 7 of 'x.csv'"``.
    """

    @property
    def num_records(self) -> int:
        """How many records there are; opens the source when it must."""

    def read(self, seed: int, batch: BatchId) -> Batch:
        """The records at the positions of ``batch`` in its epoch's seeded order. Over an epoch
        every record has exactly one position. The same arguments give the same records in every
        process.

        Raises:
            InvalidJob: positions outside the data, or the source does not hold what it says.
        """

    def read_range(self, start: int, stop: int) -> Batch:
        """Records ``[start, stop)`` in the order of the source, for evaluation."""

    def fingerprint(self) -> str:
        """A short hash of the contents, the same on every machine; resuming with data of another
        fingerprint is refused. Takes well under a second, whatever the size."""

    def close(self) -> None:
        """Lets go of files and memory; a later read opens the source again."""


_T = TypeVar("_T")


def map_arrays(function: Callable[[Any], _T], nest: Any) -> Any:
    """``nest`` with ``function`` applied to each array in its dicts, lists and tuples."""
    if isinstance(nest, dict):
        return {key: map_arrays(function, value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)([map_arrays(function, value) for value in nest])
    return function(nest)


def arrays_of(nest: Any) -> Iterator[Any]:
    """The arrays in a nest, :class:`worker.data.ragged.Ragged` among them, in a fixed order."""
    if isinstance(nest, dict):
        for key in sorted(nest):
            yield from arrays_of(nest[key])
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from arrays_of(value)
    else:
        yield nest


def check_range(name: str, first: int, stop: int, records: int) -> None:
    """Refuses ``[first, stop)`` unless it lies within ``records`` records."""
    if not 0 <= first < stop <= records:
        raise InvalidData(
            f"{name} has {counted(records, 'record')}; [{first}, {stop}) is not a part of them"
        )


def check_count(name: str, batch: object, expected: int) -> Batch:
    """``batch``, in NumPy, if it is one of ``expected`` records; an error that names both counts if
    not. ``name`` says who made it.
    """
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
