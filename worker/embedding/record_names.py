"""Names the record that an error is about, so that it can be found in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from psrpc.core.batch import BatchId
from psrpc.core.errors import InvalidJob
from worker.data.ragged import Ragged
from worker.data.source import DataSource, arrays_of
from worker.embedding.rows import OutsideVocabulary


@contextmanager
def naming_record(x: Any, count: int, name: Callable[[int], str]) -> Iterator[None]:
    """Adds to an error on an id which of ``count`` records has it, where that is known.

    Args:
        x: their inputs, as the source gave them.
        name: of the record at a place among them; empty if it has none.
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
    """Names records of a batch of a source that says how it names them."""
    named = getattr(source, "record_name", None)
    return lambda place: "" if named is None else named(seed, batch.epoch, batch.first + place)


def not_finite(source: DataSource, seed: int, batch: BatchId) -> str:
    """What of a batch of training data is NaN or infinite, by its records; empty where nothing is,
    or the source gives it no more."""
    try:
        parts = source.read(seed, batch)
        name = name_in_batch(source, seed, batch)
        found = [
            f"{label} {_bad_records(array, batch.count, name)}"
            for part, value in zip(("x", "y", "sample_weight"), parts, strict=False)
            for label, array in _labelled(part, value)
            if not _finite(array)
        ]
    except Exception:
        # Code of the user's; it has been run for this batch before, and an error is no answer.
        return ""
    return "; ".join(found)


def _labelled(label: str, nest: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a nest, with what they are called in it."""
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield from _labelled(f"{label}[{key!r}]", value)
    elif isinstance(nest, list | tuple):
        for index, value in enumerate(nest):
            yield from _labelled(f"{label}[{index}]", value)
    else:
        yield label, nest


def _values(array: Any) -> Any:
    return array.values if isinstance(array, Ragged) else np.asarray(array)


def _finite(array: Any) -> bool:
    array = _values(array)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _bad_records(array: Any, count: int, name: Callable[[int], str]) -> str:
    """``has a NaN in record 37``: the first few of those that an array has."""
    values = [_values(array[place : place + 1]) for place in range(count)]
    bad = [place for place, value in enumerate(values) if not _finite(value)]
    what = "a NaN" if any(np.isnan(values[place]).any() for place in bad) else "an infinite value"
    names = [named for named in map(name, bad[:_NAMED]) if named]
    if not names:
        return f"has {what}"
    more = f" and {len(bad) - len(names)} more" if len(bad) > len(names) else ""
    return f"has {what} in {', '.join(names)}{more}"


_NAMED = 3
"""Records that are named; of more their number."""


def _place(error: OutsideVocabulary, x: Any, count: int) -> int | None:
    """Which of the records has the id. A model may join, cut or change ids before a layer has them,
    so it is looked for in the records, too."""
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
