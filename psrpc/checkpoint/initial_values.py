"""Reads the initial rows of a job's tables from a checkpoint of another job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from psrpc.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from psrpc.checkpoint.rows_chain import Removed, opened_chain
from psrpc.checkpoint.rows_reader import RowsBlock
from psrpc.core.errors import CheckpointError, InvalidData, InvalidJob, PsError
from psrpc.core.tables import TableSpec, shard_of
from psrpc.files.remote import find_in
from psrpc.files.remote_copies import copied_here
from psrpc.files.storage import DISK, Storage

FirstRows = Iterator[tuple[int, Removed | RowsBlock]]
"""Numbers of tables, each with a step. Only ``ids`` and ``values`` of blocks are used."""


def shared_tables(here: Sequence[TableSpec], wanted: Sequence[TableSpec]) -> Mapping[int, int]:
    """Finds the tables that both a checkpoint and a job have, by name. Returns the number of each
    in the checkpoint -> its number in the job.

    Raises:
        InvalidJob: a table has another width; names the table and both widths.
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
    """Yields, for one shard, the number of a table of the job and a step to apply to it, in order.
    The checkpoint may have any number of shards. Later rows replace earlier rows of the same id.
    Ids outside the vocabulary of a table are left out. Tables that the checkpoint does not have get
    no steps. After an error the caller must discard all earlier steps, as with
    :func:`psrpc.checkpoint.rows_chain.load_rows`.

    Raises:
        CheckpointError: the files are damaged, or are not a checkpoint.
        InvalidJob: as in :func:`shared_tables`.
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


def dense_files(manifest: Manifest) -> list[str]:
    """Returns the names of the checkpoint's files with model variables."""
    return [file.name for file in manifest.files]


def row_files(manifest: Manifest) -> list[str]:
    """Returns the names of the checkpoint's files with rows of tables."""
    return [entry.name for file in manifest.files for entry in file.rows]


@contextmanager
def checkpoint_here(
    url: str, wanted: Callable[[Manifest], Iterable[str]] = lambda _manifest: ()
) -> Iterator[Path]:
    """Copies the manifest of the checkpoint at ``url`` and its ``wanted`` files; yields the
    directory of the copies, which exists as long as the context.

    Raises:
        CheckpointError: there is no checkpoint, or it lacks one of these files. In errors that the
            body raises, the path of the copies is replaced by the URL.
        InvalidData: the files cannot be read, or there is no room for the copies.
    """
    if "::" in url:
        # Refuses chained protocols, since fsspec would open further kinds of file systems for them.
        raise InvalidData(f"{url}: copies are made of what a URL names by itself; leave the :: out")
    there = find_in(url)
    if MANIFEST not in there:
        raise CheckpointError(f"{url} has no {MANIFEST}: it is not a checkpoint", code="PS404")
    with copied_here(url, {MANIFEST: there[MANIFEST]}) as head, _named(head, url):
        names = [MANIFEST, *wanted(read_manifest(head))]
        for name in names:
            if name not in there:
                raise CheckpointError(f"{url} has no file {name}, which its {MANIFEST} names")
        with copied_here(url, {name: there[name] for name in names}) as folder, _named(folder, url):
            yield folder


@contextmanager
def _named(folder: Path, url: str) -> Iterator[None]:
    """Replaces the path of the copy in an error by the URL."""
    try:
        yield
    except PsError as error:
        if str(folder) not in str(error):
            raise
        text = str(error).replace(str(folder), url.rstrip("/"))
        raise type(error)(text, code=error.code) from None
