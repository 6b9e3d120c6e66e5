"""Rows that a job's tables begin with: those of a checkpoint of another job, values alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from psrpc.checkpoint.manifest import read_manifest
from psrpc.checkpoint.rows_chain import Removed, opened_chain
from psrpc.checkpoint.rows_reader import RowsBlock
from psrpc.core.errors import InvalidJob
from psrpc.core.tables import TableSpec, shard_of
from psrpc.files.storage import DISK, Storage

FirstRows = Iterator[tuple[int, Removed | RowsBlock]]
"""Of blocks only ``ids`` and ``values`` are of use."""


def shared_tables(here: Sequence[TableSpec], wanted: Sequence[TableSpec]) -> Mapping[int, int]:
    """The tables of a checkpoint that a job has too, by name: the number of each in the checkpoint
    and in the job.

    Raises:
        InvalidJob: one has another width; names it and both.
    """
    numbers = {table.name: number for number, table in enumerate(wanted)}
    shared = {}
    for theirs, table in enumerate(here):
        ours = numbers.get(table.name)
        if ours is None:
            continue
        if wanted[ours].width != table.width:
            raise InvalidJob(
                f"table {table.name!r} has width {table.width} there; the job has it with width "
                f"{wanted[ours].width}: set it back, or give the table another name"
            )
        shared[theirs] = ours
    return shared


def load_first_rows(
    directory: Path,
    tables: Sequence[TableSpec],
    shard: int,
    shards: int,
    storage: Storage = DISK,
) -> FirstRows:
    """What ``shard`` of ``shards`` takes over, whatever the number of shards there: the number of a
    table of the job, and what is to be done to it, in this order. Later rows replace earlier ones
    of the same id. Ids outside of a table's vocabulary are left out, tables that the checkpoint
    does not have get nothing.

    As with :func:`psrpc.checkpoint.rows_chain.load_rows`, all that was given is to be forgotten
    after an error.

    Raises:
        CheckpointError: the files are damaged, or no checkpoint.
        InvalidJob: as :func:`shared_tables`.
    """
    manifest = read_manifest(directory, storage)
    shared = shared_tables(manifest.plan.tables, tables)
    for file in manifest.files if shared else ():
        for reader in opened_chain(directory, manifest, file, storage):
            reader.check()
            for theirs, ours in shared.items():
                for ids in reader.removed(theirs):
                    yield ours, Removed(ids[shard_of(ids, shards) == np.uint64(shard)])
                for block in reader.blocks(theirs):
                    ids, vocabulary = block.ids, tables[ours].vocabulary
                    own = shard_of(ids, shards) == np.uint64(shard)
                    if vocabulary is not None:
                        own &= (ids >= 0) & (ids < vocabulary)
                    yield ours, block.chosen(own)
