"""Which rows of the embedding tables a batch needs, and where each of its ids finds its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from psrpc.errors import InvalidJob
from psrpc.tables import MAX_IDS, Ids, Rows, TableSpec, shard_of

Places = npt.NDArray[np.int32]
RowValues = npt.NDArray[np.float32]
OutOfVocabulary = Literal["error", "clip", "drop"]


@dataclass(frozen=True)
class IdRule:
    """What the ids of one call of a layer mean. ``padding`` is the id that stands for none, and
    ``layer`` the name for messages."""

    layer: str
    out_of_vocabulary: OutOfVocabulary = "error"
    padding: int | None = None

    @property
    def drops(self) -> bool:
        """Whether an id may come to no row."""
        return self.padding is not None or self.out_of_vocabulary == "drop"


@dataclass(frozen=True)
class Call:
    """One call of an Embedding layer in a run of the model: the index of its table, and its
    rule."""

    table: int
    rule: IdRule


@dataclass(frozen=True, eq=False)
class RowsNeeded:
    """Rows that a batch needs, each once.

    Attributes:
        ids: of each table, int64 ``[n]``, shard after shard, ascending in each.
        cuts: of each table, ``[shards + 1]``: shard k has ``ids[cuts[k]:cuts[k + 1]]``.
    """

    ids: tuple[Ids, ...] = field(repr=False)
    cuts: tuple[tuple[int, ...], ...]

    def on_shard(self, shard: int) -> dict[int, slice]:
        """The part of each table that is there, by the index of the table; none that is empty."""
        return {
            table: slice(cuts[shard], cuts[shard + 1])
            for table, cuts in enumerate(self.cuts)
            if cuts[shard] < cuts[shard + 1]
        }

    def split(self, values: Sequence[RowValues], shards: int) -> tuple[dict[int, Rows], ...]:
        """What each shard gets of ``values``, one array ``[n or more, width]`` for each table:
        views, by the index of the table."""
        return tuple(
            {
                table: Rows(self.ids[table][part], values[table][part])
                for table, part in self.on_shard(shard).items()
            }
            for shard in range(shards)
        )


@dataclass(frozen=True, eq=False)
class ByRow:
    """Where the ids of one table stand in a batch, those of one row after those of another.

    Attributes:
        order: int32, places in all ids of the table, those of one call after those of the other;
            none of ids that come to no row. In the order of the rows, and as in the batch where
            several share one.
        starts: int64 ``[rows + 1]``: row r has ``order[starts[r]:starts[r + 1]]``, at least one.
    """

    order: Places
    starts: npt.NDArray[np.int64]


def find_rows(
    tables: Sequence[TableSpec], calls: Sequence[Call], found: Sequence[Ids], shards: int
) -> tuple[RowsNeeded, tuple[Places, ...]]:
    """The rows that a batch needs, and of each call the places of its ids among those of its
    table, int32 in the shape of ``found``; -1 where an id comes to no row.

    Args:
        found: the ids that each of ``calls`` was given, int64 of any shape.

    Raises:
        InvalidJob: an id is outside its table's vocabulary, or there are more ids than one message
            may name.
    """
    ids: list[Ids] = []
    cuts: list[tuple[int, ...]] = []
    places: list[Places] = [np.empty(0, np.int32)] * len(calls)
    for index, table in enumerate(tables):
        mine = [i for i, call in enumerate(calls) if call.table == index]
        flat: list[Ids] = []
        used: list[npt.NDArray[np.bool_] | None] = []
        for i in mine:
            each, kept = _checked(table, calls[i].rule, found[i].reshape(-1))
            used.append(kept)
            flat.append(each if kept is None else each[kept])
        unique, inverse = np.unique(
            np.concatenate(flat) if flat else np.empty(0, np.int64), return_inverse=True
        )
        unique, rank, cut = _by_shard(unique, shards)
        ids.append(unique)
        cuts.append(cut)
        at = rank[inverse]
        start = 0
        for i, each, kept in zip(mine, flat, used, strict=True):
            mine_at = at[start : start + each.size]
            start += each.size
            if kept is not None:
                everywhere = np.full(found[i].size, -1, np.int32)
                everywhere[kept] = mine_at
                mine_at = everywhere
            places[i] = mine_at.reshape(found[i].shape)
    needed = RowsNeeded(tuple(ids), tuple(cuts))
    for shard in range(shards):
        count = sum(part.stop - part.start for part in needed.on_shard(shard).values())
        if count > MAX_IDS:
            raise InvalidJob(
                f"a batch needs {count} rows of shard {shard}, more than the {MAX_IDS} that one "
                "message names; use a smaller batch_size or more shards"
            )
    return needed, tuple(places)


def by_row(
    tables: Sequence[TableSpec], calls: Sequence[Call], places: Sequence[Places]
) -> tuple[ByRow, ...]:
    """Of each table, the order of its ids by their row. Each row that a batch needs has one."""
    orders = []
    for index in range(len(tables)):
        mine = [
            place.reshape(-1)
            for place, call in zip(places, calls, strict=True)
            if call.table == index
        ]
        at = np.concatenate(mine) if mine else np.empty(0, np.int32)
        # To sort numbers is faster than to find the order that sorts them.
        keys = at.astype(np.int64) << 32 | np.arange(at.size)
        keys.sort()
        keys = keys[np.count_nonzero(at < 0) :]
        starts = np.flatnonzero(np.diff(keys >> 32, prepend=-1))
        orders.append(ByRow(keys.astype(np.int32), np.append(starts, keys.size)))
    return tuple(orders)


def _by_shard(unique: Ids, shards: int) -> tuple[Ids, Places, tuple[int, ...]]:
    """Ascending ids sorted by shard, the new place of each, and where shards begin and end."""
    if shards == 1:
        return unique, np.arange(unique.size, dtype=np.int32), (0, unique.size)
    shard = shard_of(unique, shards).astype(np.uint16)
    # Stable, so that ids of one shard still ascend; by radix for so short integers.
    order = np.argsort(shard, kind="stable")
    rank = np.empty(unique.size, np.int32)
    rank[order] = np.arange(unique.size, dtype=np.int32)
    counts = np.bincount(shard, minlength=shards)
    return unique[order], rank, (0, *np.cumsum(counts).tolist())


def _checked(table: TableSpec, rule: IdRule, ids: Ids) -> tuple[Ids, npt.NDArray[np.bool_] | None]:
    """``ids`` within the vocabulary, and which of them count; None is all."""
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
        raise InvalidJob(
            f"layer {rule.layer!r} was given id {int(ids[outside][0])}, which table "
            f"{table.name!r} has not: its ids are 0 to {table.vocabulary - 1}; mend the data, or "
            "say out_of_vocabulary='clip' or 'drop'"
        )
    return ids, kept
