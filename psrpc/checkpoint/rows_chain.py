"""Assembles the rows of a checkpoint from the parts that each shard has written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psrpc.checkpoint.manifest import Manifest, ManifestFile, check_identity, read_manifest
from psrpc.checkpoint.rows_file import Counts
from psrpc.checkpoint.rows_reader import RowsBlock, RowsReader
from psrpc.core.errors import CheckpointError
from psrpc.core.plan import Plan
from psrpc.core.tables import Ids, TableSpec, shard_of
from psrpc.files.storage import DISK, Storage


@dataclass(frozen=True)
class Removed:
    """The ids of rows removed since the previous part."""

    ids: Ids


@dataclass(frozen=True)
class SavedCandidates:
    """Candidates, which are ids with a count but without a row, and the version that named each
    last. All pieces of one table together are its candidates."""

    ids: Ids
    counts: Counts
    touched: Counts


RowsStep = Removed | RowsBlock | SavedCandidates


def load_rows(
    directory: Path,
    plan: Plan,
    shard: int,
    run_id: str | None = None,
    storage: Storage = DISK,
) -> Iterator[tuple[int, RowsStep]]:
    """Yields, for ``shard`` of ``plan``, numbers of tables and steps to apply to them, in order.

    The checkpoint may have any number of shards. Later rows replace earlier rows of the same id. A
    step has a few megabytes at most. Tables that the checkpoint does not have get no steps.

    Each part is compared with the manifest before its first step is yielded. Since a later part may
    be damaged, the caller must discard all earlier steps after an error.

    Raises:
        CheckpointError: the files are damaged, or belong to another checkpoint or other tables.
    """
    manifest = read_manifest(directory, storage)
    check_identity(directory, manifest, run_id)
    compare_tables(directory, manifest.plan.tables, plan.tables)
    numbers = {table.name: number for number, table in enumerate(plan.tables)}
    if not plan.tables_on(shard):
        return
    same = manifest.plan.row_shards == plan.row_shards
    for file in manifest.files:
        if same and file.shard != shard:
            continue
        for reader in opened_chain(directory, manifest, file, storage):
            reader.check()
            for theirs, table in enumerate(manifest.plan.tables):
                for step in _steps(reader, theirs, last=reader.header.part == len(file.rows) - 1):
                    yield numbers[table.name], step if same else _own(step, shard, plan.row_shards)


def check_chain(
    directory: Path, manifest: Manifest, file: ManifestFile, storage: Storage = DISK
) -> None:
    """Verifies all parts of one shard's rows completely, as a restart does.

    Raises:
        CheckpointError: a restart would refuse the parts.
    """
    for reader in opened_chain(directory, manifest, file, storage):
        reader.check()


def table_sizes(directory: Path, manifest: Manifest, storage: Storage = DISK) -> dict[str, int]:
    """Counts the rows of each table, from the headers of the files.

    Raises:
        CheckpointError: a file cannot be read.
    """
    sizes = {table.name: 0 for table in manifest.plan.tables}
    for file in manifest.files:
        for entry in file.rows[-1:]:
            with RowsReader(directory / entry.name, entry.nbytes, entry.sha256, storage) as reader:
                for table, rows in zip(reader.header.tables, reader.header.rows, strict=True):
                    sizes[table.name] = sizes.get(table.name, 0) + rows
    return sizes


def load_table(directory: Path, name: str, storage: Storage = DISK) -> RowsBlock:
    """Returns all rows of one table in memory, sorted by id.

    Raises:
        CheckpointError: there is no such table, or the files are damaged.
    """
    ids = table_ids(directory, name, storage)
    manifest, number = _find(directory, name, storage)
    slots: dict[str, npt.NDArray[np.float32]] = {}
    values = np.empty((ids.size, manifest.plan.tables[number].width), np.float32)
    counts, touched = np.empty(ids.size, np.uint32), np.empty(ids.size, np.uint32)
    for at, block in _placed_blocks(directory, manifest, number, ids, storage):
        values[at], counts[at], touched[at] = block.values, block.counts, block.touched
        for slot, array in block.slots.items():
            if slot not in slots:
                slots[slot] = np.zeros((ids.size, array.shape[1]), np.float32)
            slots[slot][at] = array
    return RowsBlock(ids, values, slots, counts, touched)


def table_ids(directory: Path, name: str, storage: Storage = DISK) -> Ids:
    """Returns the sorted ids of all rows of one table. Needs 8 bytes of memory for each.

    Raises:
        CheckpointError: as :func:`load_table`.
    """
    manifest, number = _find(directory, name, storage)
    shards = []
    for file in manifest.files:
        there: Ids = np.zeros(0, np.int64)
        for reader in opened_chain(directory, manifest, file, storage):
            reader.check()
            removed = [there[:0], *reader.removed(number)]
            there = np.setdiff1d(there, np.concatenate(removed), assume_unique=True)
            there = np.union1d(there, np.concatenate([there[:0], *reader.ids(number)]))
        shards.append(there)
    return np.sort(np.concatenate(shards))


def fill_rows(
    directory: Path,
    name: str,
    ids: Ids,
    into: npt.NDArray[np.float32],
    storage: Storage = DISK,
) -> None:
    """Writes the rows of one table into ``into``, float32 ``[n, width]``, which may be mapped from
    a file. Rows are in the order of ``ids``, a result of :func:`table_ids`.

    Raises:
        CheckpointError: as :func:`load_table`.
    """
    manifest, number = _find(directory, name, storage)
    for at, block in _placed_blocks(directory, manifest, number, ids, storage):
        into[at] = block.values


def compare_tables(directory: Path, here: Sequence[TableSpec], wanted: Sequence[TableSpec]) -> None:
    """Checks that each table of a checkpoint is in the job, with the same settings as far as rows
    depend on them. The job may have new tables.

    Raises:
        CheckpointError: names the table and what differs.
    """
    specs = {table.name: table for table in wanted}
    for table in here:
        spec = specs.get(table.name)
        if spec is None:
            raise CheckpointError(
                f"{directory} has table {table.name!r}; the job has none of that name", code="PS405"
            )
        for what, found, expected in (
            ("width", table.width, spec.width),
            ("vocabulary", table.vocabulary, spec.vocabulary),
            ("initializer", dict(table.initializer), dict(spec.initializer)),
            ("optimizer", optimizer_kind(table), optimizer_kind(spec)),
            ("seed", table.seed, spec.seed),
        ):
            if found != expected:
                # The description of a table does not say whether the optimizer is its own or the
                # job's.
                whose = " (its own, or the job's if it has none)" if what == "optimizer" else ""
                raise CheckpointError(
                    f"{directory} has table {table.name!r} with {what} {found!r}; the job has it "
                    f"with {expected!r}{whose}: set it back, or give the table another name",
                    code="PS405",
                )


def optimizer_kind(table: TableSpec) -> str:
    """Returns the class of a table's optimizer and those of its settings that decide which slots
    rows have."""
    config = table.optimizer["config"]
    given = [argument for argument in ("momentum", "amsgrad") if config.get(argument)]
    return " with ".join([table.optimizer["class_name"], *given])


def opened_chain(
    directory: Path, manifest: Manifest, file: ManifestFile, storage: Storage = DISK
) -> Iterator[RowsReader]:
    """Yields the parts of one shard's rows. Each is open until the next is requested, and its
    header was compared with the manifest. Raises CheckpointError."""
    after = ""
    for number, entry in enumerate(file.rows):
        path = directory / entry.name
        with RowsReader(path, entry.nbytes, entry.sha256, storage) as reader:
            # All parts but the last may have been written for earlier checkpoints.
            last = number == len(file.rows) - 1
            check_header(reader, manifest, file, number, after, own=last)
            yield reader
        after = entry.sha256


def check_header(
    reader: RowsReader, manifest: Manifest, file: ManifestFile, part: int, after: str, own: bool
) -> None:
    """Checks the header of a file of a shard's rows against the manifest.

    Args:
        part, after: the values that the header must have.
        own: whether the file was written for this checkpoint, not for an earlier one.

    Raises:
        CheckpointError: the header is not as the manifest says.
    """
    expected: dict[str, object] = {
        "shard": file.shard,
        "shards": manifest.plan.shards,
        "part": part,
        "after": after,
        "plan_hash": manifest.plan.hash.hex(),
        "run_id": manifest.run_id,
    }
    if own:
        expected["generation"] = manifest.generation
        expected["global_step"] = manifest.global_step
        expected["version"] = file.version
    for what, value in expected.items():
        if (found := getattr(reader.header, what)) != value:
            raise CheckpointError(
                f"{reader.path} is of {what} {found!r}; its manifest says {value!r}"
            )
    if tuple(reader.header.tables) != manifest.plan.tables:
        raise CheckpointError(f"{reader.path} is of other tables than its manifest")


def _steps(reader: RowsReader, table: int, last: bool) -> Iterator[RowsStep]:
    for ids in reader.removed(table):
        yield Removed(ids)
    yield from reader.blocks(table)
    if last:
        # Each part has all candidates of its time, so only those of the last part are needed.
        for ids, counts, touched in reader.candidates(table):
            yield SavedCandidates(ids, counts, touched)


def _own(step: RowsStep, shard: int, shards: int) -> RowsStep:
    where = shard_of(step.ids, shards) == np.uint64(shard)
    match step:
        case Removed(ids):
            return Removed(ids[where])
        case SavedCandidates(ids, counts, touched):
            return SavedCandidates(ids[where], counts[where], touched[where])
        case RowsBlock():
            return step.chosen(where)


def _find(directory: Path, name: str, storage: Storage) -> tuple[Manifest, int]:
    manifest = read_manifest(directory, storage)
    names = [table.name for table in manifest.plan.tables]
    if name not in names:
        known = ", ".join(names) or "none"
        raise CheckpointError(f"{directory} has no table {name!r}; it has {known}")
    return manifest, names.index(name)


def _placed_blocks(
    directory: Path, manifest: Manifest, table: int, ids: Ids, storage: Storage
) -> Iterator[tuple[npt.NDArray[np.int64], RowsBlock]]:
    """Yields rows of a table with their positions in the sorted ``ids``. Later rows of an id
    replace earlier ones."""
    for file in manifest.files:
        for reader in opened_chain(directory, manifest, file, storage):
            reader.check()
            for block in reader.blocks(table):
                at = np.searchsorted(ids, block.ids)
                there = at < ids.size
                there[there] = ids[at[there]] == block.ids[there]
                yield at[there], block.chosen(there)
