"""Which rows of the embedding tables a batch needs, and where each of its ids finds its own."""

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
"""Which of some ids come to a row; None is all."""

OutOfVocabulary = Literal["error", "clip", "drop"]

_MAX_PACKED = 2**31 - 1
"""Ids from 0 to this leave room for their place in 64 bits."""


@dataclass(frozen=True)
class IdRule:
    """What the ids of one call of a layer mean. ``padding`` is the id that stands for none, and
    ``layer`` the name for messages; ``strings`` are what the layer was given."""

    layer: str
    out_of_vocabulary: OutOfVocabulary = "error"
    padding: int | None = None
    strings: bool = False

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


class OutsideVocabulary(InvalidJob):
    """A layer was given an id that its table does not have.

    Attributes:
        bad_id: the first such id.
        place: where it stands along the first axis of the layer's ids, and how long that axis is;
            None where the layer was given a scalar.
    """

    def __init__(self, message: str, bad_id: int, place: tuple[int, int] | None) -> None:
        super().__init__(message)
        self.bad_id = bad_id
        self.place = place


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
) -> tuple[RowsNeeded, tuple[Places, ...], tuple[ByRow, ...]]:
    """The rows that a batch needs; of each call the places of its ids among those of its table,
    int32 in the shape of ``found``, -1 where an id comes to no row; and of each table the order of
    its ids by their row.

    Args:
        found: the ids that each of ``calls`` was given, int64 of any shape.

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
    """All ids that a table is asked for, in one piece, within its vocabulary, and which count."""
    flat, kept = [], []
    for rule, given in zip(rules, found, strict=True):
        each, counts = _checked(table, rule, given.reshape(-1), given.shape)
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
    """Those of ``ids`` that are ``kept``, each once and ascending, and the order of all that are
    equal to each."""
    places = np.arange(ids.size) if kept is None else np.flatnonzero(kept)
    ids = ids if kept is None else ids[kept]
    numbers, unique = ids, None
    if not (ids.size and ids.min() >= 0 and ids.max() <= _MAX_PACKED):
        unique, numbers = np.unique(ids, return_inverse=True)
    # To sort numbers is several times as fast as to find the order that sorts them.
    keys = numbers << 32
    keys |= places
    keys.sort()
    order = keys.astype(np.int32)
    keys >>= 32
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    unique = keys[starts] if unique is None else unique
    return unique, ByRow(order, np.append(starts, ids.size))


def _by_shard(unique: Ids, by: ByRow, shards: int) -> tuple[Ids, ByRow, tuple[int, ...]]:
    """Ascending ids and their order, sorted by shard; and where shards begin and end."""
    if shards == 1:
        return unique, by, (0, unique.size)
    shard = shard_of(unique, shards).astype(np.uint16)
    # Stable, so that ids of one shard still ascend; by radix for so short integers.
    rows = np.argsort(shard, kind="stable")
    counts = np.diff(by.starts)[rows]
    starts = np.append(0, np.cumsum(counts))
    # From where each row has moved, for all of its places.
    moved = np.repeat(by.starts[rows] - starts[:-1], counts)
    moved += np.arange(by.order.size)
    sizes = np.bincount(shard, minlength=shards)
    return unique[rows], ByRow(by.order[moved], starts), (0, *np.cumsum(sizes).tolist())


def _checked(table: TableSpec, rule: IdRule, ids: Ids, shape: tuple[int, ...]) -> tuple[Ids, Kept]:
    """``ids`` within the vocabulary, and which of them count; None is all. They are flat; the layer
    was given them in ``shape``."""
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
