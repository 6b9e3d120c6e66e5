"""Names the record that an error is about, so that it can be found in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from psrpc.batch import BatchId
from psrpc.errors import InvalidJob
from worker.data import DataSource, arrays_of
from worker.ragged import Ragged
from worker.rows import OutsideVocabulary


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
