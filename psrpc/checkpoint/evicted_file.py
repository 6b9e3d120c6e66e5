"""Evicted rows in checkpoints: each checkpoint has the rows evicted since the previous checkpoint.

A restart does not restore them. If several checkpoints have an id, the newest of them has its
values at the last eviction. The table itself may have the id again by now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psrpc.checkpoint.manifest import Manifest, ManifestFile
from psrpc.checkpoint.rows_chain import check_header
from psrpc.checkpoint.rows_reader import RowsReader
from psrpc.core.tables import Ids
from psrpc.files.storage import DISK

Source = tuple[Path, Manifest]
"""A directory with the evicted rows of a checkpoint, and the checkpoint's manifest."""


def check_evicted(directory: Path, manifest: Manifest, file: ManifestFile) -> None:
    """Verifies the evicted rows of one shard, if there are any.

    Raises:
        CheckpointError: they are damaged, or not as the manifest says.
    """
    if file.evicted is not None:
        with _opened(directory, manifest, file) as reader:
            reader.check()


def evicted_sizes(directory: Path, manifest: Manifest) -> dict[str, int]:
    """Counts the evicted rows of each table, from the headers; leaves out tables without any.

    Raises:
        CheckpointError: a file cannot be read.
    """
    sizes: dict[str, int] = {}
    for file in manifest.files:
        if file.evicted is not None:
            with _opened(directory, manifest, file) as reader:
                for number, table in enumerate(manifest.plan.tables):
                    if rows := reader.rows(number):
                        sizes[table.name] = sizes.get(table.name, 0) + rows
    return sizes


def evicted_ids(sources: Sequence[Source], table: str) -> Ids:
    """Returns the sorted, distinct ids of all evicted rows of a table. Needs 8 bytes of memory for
    each. Skips sources without this table.

    Raises:
        CheckpointError: the files are damaged.
    """
    found: Ids = np.zeros(0, np.int64)
    for reader, number in _readers(sources, table):
        found = np.union1d(found, np.concatenate([found[:0], *reader.ids(number)]))
    return found


def fill_evicted(
    sources: Sequence[Source],
    table: str,
    ids: Ids,
    into: npt.NDArray[np.float32],
) -> None:
    """Writes evicted rows of a table into ``into``, float32 ``[n, width]``, which may be mapped
    from a file. Rows are in the order of ``ids``, a result of :func:`evicted_ids`. ``sources`` are
    sorted, oldest first; if they have several rows of an id, the last one is written.

    Raises:
        CheckpointError: the files are damaged.
    """
    for reader, number in _readers(sources, table):
        for block in reader.blocks(number):
            into[np.searchsorted(ids, block.ids)] = block.values


def _readers(sources: Sequence[Source], table: str) -> Iterator[tuple[RowsReader, int]]:
    """Yields each verified file, and the number of the table in it."""
    for directory, manifest in sources:
        names = [spec.name for spec in manifest.plan.tables]
        for file in manifest.files:
            if file.evicted is not None and table in names:
                with _opened(directory, manifest, file) as reader:
                    reader.check()
                    yield reader, names.index(table)


@contextmanager
def _opened(directory: Path, manifest: Manifest, file: ManifestFile) -> Iterator[RowsReader]:
    entry = file.evicted
    assert entry is not None
    path = directory / entry.name
    with RowsReader(path, entry.nbytes, entry.sha256, DISK) as reader:
        check_header(reader, manifest, file, part=0, after="", own=True)
        yield reader
