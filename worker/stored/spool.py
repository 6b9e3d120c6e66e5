"""Reads a ``tf.data.Dataset`` once, batch by batch, into files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from psrpc.core.errors import InvalidData
from psrpc.core.text import counted
from worker.data.function import dataset_steps
from worker.stored.forms import as_batch
from worker.stored.py_dataset import records_of
from worker.stored.stored_records import RecordsWriter, check_disk, in_units

_CHECKED_NBYTES = 64 << 20
"""Bytes that are written between two checks of the room on the disk."""


def spool(folder: Path, dataset: Any, say: Callable[[str], object]) -> tuple[list[Any], int, int]:
    """Writes the records of a finite dataset of batches to ``folder``.

    Returns:
        The description for :func:`worker.stored.stored_records.open_records`, the batch size, which
        is that of the first batch, and the number of records.

    Raises:
        InvalidData: batches have different forms, or one before the last has another size.
        PsError: PS502, the dataset is larger than the disk.
    """
    _check_batched(dataset)
    with ExitStack() as opened:
        writer: RecordsWriter | None = None
        batch_size = records = checked_nbytes = 0
        for index, element in enumerate(dataset):
            producer = f"batch {index} of the dataset"
            batch = as_batch(producer, element)
            count = records_of(batch)
            if writer is None:
                batch_size = count
                writer = opened.enter_context(closing(RecordsWriter(folder, batch, _storable)))
            _check_size(index, count, records, batch_size)
            writer.append(batch, producer)
            records += count
            if not index:
                _announce(folder, dataset, writer.nbytes, say)
            if writer.nbytes - checked_nbytes > _CHECKED_NBYTES:
                check_disk(folder, _CHECKED_NBYTES)
                checked_nbytes = writer.nbytes
        if writer is None:
            raise InvalidData("the tf.data.Dataset gave 0 batches; expected at least one")
        return writer.complete(), batch_size, records


def _check_size(index: int, count: int, before: int, batch_size: int) -> None:
    """Refuses batch ``index`` with ``count`` records after ``before`` others, unless all batches
    before it are full."""
    if before == index * batch_size and count <= batch_size:
        return
    at, size = (index, count) if count > batch_size else (index - 1, before % batch_size)
    raise InvalidData(
        f"batch {at} of the dataset has {counted(size, 'record')}, and the first one {batch_size}; "
        "expected batches of one size, of which only the last may be smaller: end with "
        f".unbatch().batch({batch_size})"
    )


def _check_batched(dataset: Any) -> None:
    import tensorflow as tf

    for spec in tf.nest.flatten(dataset.element_spec):
        if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
            raise InvalidData(
                "the tf.data.Dataset has single records, not batches, as a scalar in them shows; "
                "end with .batch(n)"
            )


def _announce(folder: Path, dataset: Any, nbytes: int, say: Callable[[str], object]) -> None:
    """Says how much room the dataset takes, by the size of its first batch; refuses it if there is
    less."""
    batches = int(dataset.cardinality())
    if batches > 0:
        check_disk(folder, batches * nbytes)
        size = f"{counted(batches, 'batch', 'batches')}, about {in_units(batches * nbytes)}"
    else:
        size = f"batches of {in_units(nbytes)}, it does not say how many"
    also = ""
    if "shuffle" in dataset_steps(dataset):
        also = "; it shuffles, and the order of this reading holds for all epochs"
    say(f"reading the tf.data.Dataset once into {str(folder)!r}: {size}{also}")


def _storable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype
