"""Data of ``fit`` as files in a directory, which every process of a local cluster opens."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import keras
import numpy as np

from psrpc.ops.logs import get_logger
from worker.data.source import DataSource, arrays_of
from worker.stored.arguments import EpochSizes, FitData
from worker.stored.objects import load_object, save_object
from worker.stored.passes import Passes
from worker.stored.py_dataset import ItemRecords
from worker.stored.spool import spool
from worker.stored.stored_records import RecordsWriter, check_disk, open_records

log = get_logger()

_OBJECT = "object.pickle"


def store(
    folder: Path, data: FitData, *, say: Callable[[str], object] = log.info
) -> dict[str, Any]:
    """Writes ``data`` into the new directory ``folder``; returns a JSON-able description of it for
    :func:`open_stored`.

    Arrays are written in pieces, those of floats as Keras's ``floatx``; a ``tf.data.Dataset`` is
    read once, from its beginning to its end.

    The description also has, for the caller: ``records`` and ``steps`` of an epoch, ``batch_size``,
    the global one, and ``labels``, whether batches have any.

    Args:
        say: called before a dataset is read, with a line about the room that it takes.

    Raises:
        InvalidData: the records of a dataset have different forms, or an object cannot be saved.
        PsError: PS502, the disk is too small; PS503 or PS504, it cannot be written to.
    """
    folder.mkdir(mode=0o700, parents=True)
    try:
        return _stored(folder, data, say)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def open_stored(folder: Path, description: Mapping[str, Any]) -> DataSource:
    """Returns the records that :func:`store` wrote to ``folder``; opens the files on first use.
    Arrays are memory maps, so all processes share their pages. A batch without labels has ``()`` in
    place of them."""
    return Passes(
        _opener(folder, description),
        pass_records=description["pass_records"],
        records=description["records"],
        batch_size=description["batch_size"],
        order=description["order"],
        fingerprint=description["fingerprint"],
        quick=description["kind"] == "arrays",
    )


def _stored(folder: Path, data: FitData, say: Callable[[str], object]) -> dict[str, Any]:
    description: dict[str, Any] = {"kind": data.kind, "order": data.order}
    if data.kind == "dataset":
        parts, batch_size, records = spool(folder, data.x, say)
        sizes = EpochSizes.of(records, batch_size, data.steps)
        description |= {"kind": "arrays", "parts": parts}
    else:
        sizes = data.sizes()
    if data.kind == "arrays":
        description["parts"] = _store_arrays(folder, data)
    elif data.kind in ("source", "py_dataset"):
        if data.kind == "source":
            data.x.close()  # leaves open files and kept records out
        save_object(folder / _OBJECT, data.x)
    description |= {
        "records": sizes.records,
        "pass_records": sizes.pass_records,
        "steps": sizes.steps,
        "batch_size": sizes.batch_size,
    }
    source = _opener(folder, description)()
    description["labels"] = _has_labels(source, description)
    text = f"{source.fingerprint()} {sizes} {data.order}"
    description["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()[:32]
    source.close()
    return description


def _opener(folder: Path, description: Mapping[str, Any]) -> Callable[[], DataSource]:
    kind = description["kind"]
    if kind == "arrays":
        return lambda: open_records(folder, description["parts"])
    if kind == "source":
        return lambda: load_object(folder / _OBJECT)
    return lambda: ItemRecords(
        lambda: load_object(folder / _OBJECT),
        batch_size=description["batch_size"],
        records=description["pass_records"],
    )


def _has_labels(source: DataSource, description: Mapping[str, Any]) -> bool:
    if description["kind"] == "arrays":
        return bool(description["parts"][1] != {"tuple": []})
    return any(True for _ in arrays_of(source.read_range(0, 1)[1]))


def _store_arrays(folder: Path, data: FitData) -> list[Any]:
    batch = (data.x, data.y) if data.weights is None else (data.x, data.y, data.weights)
    writer = RecordsWriter(folder, batch, _in_floatx, once=True)
    with closing(writer):
        check_disk(folder, writer.expected_nbytes)
        writer.append(batch, "the data")
        return writer.complete()


def _in_floatx(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype that Keras gives arrays of ``dtype``: floats of any width get its own."""
    if dtype.kind == "f" or dtype.name == "bfloat16":
        return np.dtype(str(keras.config.floatx()))
    return dtype
