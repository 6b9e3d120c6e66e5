"""Adds the name of the bad record to an error, so that the user finds it in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from worker.data.ragged import Ragged
from worker.data.source import DataSource, arrays_of, named_arrays
from worker.embedding.rows import OutsideVocabulary


@contextmanager
def naming_record(x: Any, count: int, name: Callable[[int], str]) -> Iterator[None]:
    """Adds to an error about an id the name of the record that has it, where that is known.

    Args:
        x: the inputs of ``count`` records, as the source gave them.
        name: returns the name of the record at a place among them; empty if it has none.
    """
    try:
        yield
    except OutsideVocabulary as error:
        place = _place(error, x, count)
        named = "" if place is None else name(place)
        if not named:
            raise
        raise InvalidJob(f"{named}: {error}", code=error.code) from None


def name_in_batch(source: DataSource, seed: int, batch: BatchId) -> Callable[[int], str]:
    """Returns a function that names records of a batch; it gives "" if the source has no names."""
    named = getattr(source, "record_name", None)
    return lambda place: "" if named is None else named(seed, batch.epoch, batch.first + place)


def not_finite_record(source: DataSource, seed: int, batch: BatchId) -> str:
    """Describes the NaN and infinite values of a batch of training data by record; empty if there
    are none or the source cannot read the batch again."""
    try:
        parts = source.read(seed, batch)
        name = name_in_batch(source, seed, batch)
        found = [
            f"{label} {_bad_records(array, batch.count, name)}"
            for part, value in zip(("x", "y", "sample_weight"), parts, strict=False)
            for label, array in named_arrays(part, value)
            if not _finite(array)
        ]
    except Exception:
        # User code that already ran for this batch: an error here does not explain the NaN.
        return ""
    return "; ".join(found)


def _values(array: Any) -> Any:
    return array.values if isinstance(array, Ragged) else np.asarray(array)


def _finite(array: Any) -> bool:
    array = _values(array)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _bad_records(array: Any, count: int, name: Callable[[int], str]) -> str:
    """Returns ``has a NaN in record 37``, with the first ``_NAMED`` bad records of an array."""
    values = [_values(array[place : place + 1]) for place in range(count)]
    bad = [place for place, value in enumerate(values) if not _finite(value)]
    what = "a NaN" if any(np.isnan(values[place]).any() for place in bad) else "an infinite value"
    names = [named for named in map(name, bad[:_NAMED]) if named]
    if not names:
        return f"has {what}"
    more = f" and {len(bad) - len(names)} more" if len(bad) > len(names) else ""
    return f"has {what} in {', '.join(names)}{more}"


_NAMED = 3
"""Records that a message names; it counts the others."""


def _place(error: OutsideVocabulary, x: Any, count: int) -> int | None:
    """Returns the place of the record that has the id. A model may join, cut or change ids before a
    layer gets them, so this also searches the records."""
    arrays = list(arrays_of(x))
    ragged = [array for array in arrays if isinstance(array, Ragged)]
    place = error.place[0] if error.place is not None and error.place[1] == count else None
    if place is not None:
        dense = [array for array in arrays if not isinstance(array, Ragged)]
        if not ragged or any((np.asarray(array[place]) == error.bad_id).any() for array in dense):
            return place
    for array in ragged:
        found = np.flatnonzero(array.values == error.bad_id)
        if found.size:
            return int(np.searchsorted(array.row_splits, found[0], side="right")) - 1
    return None
