"""Finds the embedding rows that a batch needs, and the row of each of its ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from psrpc.core.errors import InvalidJob
from psrpc.core.tables import MAX_IDS, Ids, Rows, TableSpec, shard_of

Places = npt.NDArray[np.int32]
RowValues = npt.NDArray[np.float32]
Kept = npt.NDArray[np.bool_] | None
"""Which ids have a row; None means all."""

OutOfVocabulary = Literal["error", "clip", "drop"]

_MAX_PACKED = 2**31 - 1
"""Ids from 0 to this fit 64 bits together with their place."""


@dataclass(frozen=True)
class IdRule:
    """The meaning of the ids of one call of a layer. ``padding`` is the id that means "no id",
    ``layer`` the name for messages; ``strings`` is whether the layer got strings."""

    layer: str
    out_of_vocabulary: OutOfVocabulary = "error"
    padding: int | None = None
    strings: bool = False

    @property
    def drops(self) -> bool:
        """Whether an id may have no row."""
        return self.padding is not None or self.out_of_vocabulary == "drop"


@dataclass(frozen=True)
class Call:
    """One call of an Embedding layer in a run of the model: the index of its table, and the meaning
    of its ids."""

    table: int
    rule: IdRule


@dataclass(frozen=True, eq=False)
class RowsNeeded:
    """Rows that a batch needs, each once.

    Attributes:
        ids: per table its ids, int64 ``[n]``: shard after shard, ascending within each shard.
        cuts: per table ``[shards + 1]``: shard k has ``ids[cuts[k]:cuts[k + 1]]``.
    """

    ids: tuple[Ids, ...] = field(repr=False)
    cuts: tuple[tuple[int, ...], ...]

    def on_shard(self, shard: int) -> dict[int, slice]:
        """Returns the shard's part of each table, by the index of the table, without empty
        parts."""
        return {
            table: slice(cuts[shard], cuts[shard + 1])
            for table, cuts in enumerate(self.cuts)
            if cuts[shard] < cuts[shard + 1]
        }

    def with_slices(self, slices: int) -> RowsNeeded:
        """Returns the same for more shards, which follow and have no rows."""
        if not slices:
            return self
        return RowsNeeded(self.ids, tuple((*cuts, *cuts[-1:] * slices) for cuts in self.cuts))

    def split(self, values: Sequence[RowValues], shards: int) -> tuple[dict[int, Rows], ...]:
        """Splits ``values``, one array ``[n or more, width]`` per table, by shard: views, by the
        index of the table."""
        return tuple(
            {
                table: Rows(self.ids[table][part], values[table][part])
                for table, part in self.on_shard(shard).items()
            }
            for shard in range(shards)
        )


class OutsideVocabulary(InvalidJob):
    """A layer got an id that its table does not have.

    Attributes:
        bad_id: the first such id.
        place: its position along the first axis of the layer's ids, and the length of that axis;
            None for a scalar.
    """

    def __init__(self, message: str, bad_id: int, place: tuple[int, int] | None) -> None:
        super().__init__(message)
        self.bad_id = bad_id
        self.place = place


@dataclass(frozen=True, eq=False)
class ByRow:
    """The places of one table's ids in a batch, grouped by row.

    Attributes:
        order: int32, places in all ids of the table, call after call, without ids that have no row;
            sorted by row, and by place within a row.
        starts: int64 ``[rows + 1]``: row r has ``order[starts[r]:starts[r + 1]]``, at least one.
    """

    order: Places
    starts: npt.NDArray[np.int64]


def find_rows(
    tables: Sequence[TableSpec], calls: Sequence[Call], found: Sequence[Ids], shards: int
) -> tuple[RowsNeeded, tuple[Places, ...], tuple[ByRow, ...]]:
    """Returns the rows that a batch needs, and the mappings between ids and rows.

    Args:
        found: the ids that each of ``calls`` got, int64 of any shape.

    Returns:
        The rows; for each call the places of its ids among its table's rows, int32 in the shape of
        ``found``, -1 for ids without a row; and for each table the order of its ids by row.

    Raises:
        OutsideVocabulary: an id is not in its table.
        InvalidJob: there are more ids than one message may name.
    """
    ids: list[Ids] = []
    cuts: list[tuple[int, ...]] = []
    orders: list[ByRow] = []
    places: list[Places] = [np.empty(0, np.int32)] * len(calls)
    for index, table in enumerate(tables):
        mine = [i for i, call in enumerate(calls) if call.table == index]
        flat, kept = _joined(table, [calls[i].rule for i in mine], [found[i] for i in mine])
        unique, by = _sorted(flat, kept)
        unique, by, cut = _by_shard(unique, by, shards)
        ids.append(unique)
        cuts.append(cut)
        orders.append(by)
        at = np.full(flat.size, -1, np.int32)
        at[by.order] = np.repeat(np.arange(unique.size, dtype=np.int32), np.diff(by.starts))
        start = 0
        for i in mine:
            places[i] = at[start : start + found[i].size].reshape(found[i].shape)
            start += found[i].size
    needed = RowsNeeded(tuple(ids), tuple(cuts))
    for shard in range(shards):
        count = sum(part.stop - part.start for part in needed.on_shard(shard).values())
        if count > MAX_IDS:
            raise InvalidJob(
                f"a batch needs {count} rows of shard {shard}, more than the {MAX_IDS} that one "
                "message names; use a smaller batch_size or more shards"
            )
    return needed, tuple(places), tuple(orders)


def _joined(table: TableSpec, rules: Sequence[IdRule], found: Sequence[Ids]) -> tuple[Ids, Kept]:
    """Concatenates all ids of a table, checked against its vocabulary; also returns which have a
    row."""
    flat, kept = [], []
    for rule, given in zip(rules, found, strict=True):
        each, counts = checked_ids(table, rule, given.reshape(-1), given.shape)
        flat.append(each)
        kept.append(counts)
    if len(flat) == 1:
        return flat[0], kept[0]
    ids = np.concatenate(flat) if flat else np.empty(0, np.int64)
    if all(counts is None for counts in kept):
        return ids, None
    all_of = zip(flat, kept, strict=True)
    return ids, np.concatenate([np.ones(f.size, np.bool_) if k is None else k for f, k in all_of])


def _sorted(ids: Ids, kept: Kept) -> tuple[Ids, ByRow]:
    """Returns the unique ids of those in ``kept``, ascending, and the places of each."""
    places = np.arange(ids.size) if kept is None else np.flatnonzero(kept)
    ids = ids if kept is None else ids[kept]
    numbers, unique = ids, None
    if not (ids.size and ids.min() >= 0 and ids.max() <= _MAX_PACKED):
        unique, numbers = np.unique(ids, return_inverse=True)
    # Sorting packed numbers is several times as fast as argsort.
    keys = numbers << 32
    keys |= places
    keys.sort()
    order = keys.astype(np.int32)
    keys >>= 32
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    unique = keys[starts] if unique is None else unique
    return unique, ByRow(order, np.append(starts, ids.size))


def _by_shard(unique: Ids, by: ByRow, shards: int) -> tuple[Ids, ByRow, tuple[int, ...]]:
    """Sorts ascending ids and their places by shard; also returns where shards begin and end."""
    if shards == 1:
        return unique, by, (0, unique.size)
    shard = shard_of(unique, shards).astype(np.uint16)
    # Stable keeps the ids of a shard ascending; numpy sorts uint16 by radix.
    rows = np.argsort(shard, kind="stable")
    counts = np.diff(by.starts)[rows]
    starts = np.append(0, np.cumsum(counts))
    # The distance that each row has moved, for all of its places.
    moved = np.repeat(by.starts[rows] - starts[:-1], counts)
    moved += np.arange(by.order.size)
    sizes = np.bincount(shard, minlength=shards)
    return unique[rows], ByRow(by.order[moved], starts), (0, *np.cumsum(sizes).tolist())


def checked_ids(
    table: TableSpec, rule: IdRule, ids: Ids, shape: tuple[int, ...]
) -> tuple[Ids, Kept]:
    """Checks flat ``ids`` against the vocabulary; also returns which have a row. ``shape`` is that
    of the layer's ids."""
    kept = None if rule.padding is None else ids != rule.padding
    if table.vocabulary is None or not ids.size:
        return ids, kept
    if ids.min() >= 0 and ids.max() < table.vocabulary:
        return ids, kept
    outside = (ids < 0) | (ids >= table.vocabulary)
    if kept is not None:
        outside &= kept
    if rule.out_of_vocabulary == "clip":
        return np.clip(ids, 0, table.vocabulary - 1), kept
    if rule.out_of_vocabulary == "drop":
        return ids, ~outside if kept is None else kept & ~outside
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise OutsideVocabulary(
            f"layer {rule.layer!r} was given id {int(ids[at])}, which table "
            f"{table.name!r} has not: its ids are 0 to {table.vocabulary - 1}; mend the data, or "
            "say out_of_vocabulary='clip' or 'drop'",
            int(ids[at]),
            (at * shape[0] // ids.size, shape[0]) if shape else None,
        )
    return ids, kept
