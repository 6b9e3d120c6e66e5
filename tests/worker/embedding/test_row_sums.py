"""Gradients of ids become gradients of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psrpc.core.tables import TableSpec
from psrpc.ops import lanes
from tests.pserver.tables.table_cases import spec
from worker.embedding.row_sets import RowSums, not_finite
from worker.embedding.rows import Call, IdRule, find_rows

FIRST = spec(name="first", width=3)
SECOND = spec(name="second", width=5)
CALLS = [Call(1, IdRule("a", padding=0)), Call(0, IdRule("b")), Call(1, IdRule("c"))]


def found(count: int = 40) -> list[Any]:
    """Ids of which few come once, one most often, and some of which count for nothing."""
    random = np.random.default_rng(count)
    return [
        np.where(random.random(count) < 0.3, 7, random.integers(0, 4 * count, count)),
        random.integers(-10, 10, (count, 2)),
        random.integers(0, 9, count),
    ]


def gradients(ids: list[Any], tables: tuple[TableSpec, ...] = (FIRST, SECOND)) -> list[Any]:
    random = np.random.default_rng(5)
    counts = [ids[1].size, ids[0].size + ids[2].size]
    return [
        random.integers(-8, 8, (count, table.width)).astype(np.float32)
        for count, table in zip(counts, tables, strict=True)
    ]


@pytest.mark.parametrize("lanes_now", [1, 3])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("count", [1, 40, 3000])
@pytest.mark.parametrize("room", [None, 0, 100, 1 << 20])
def test_every_gradient_counts_once(
    monkeypatch: pytest.MonkeyPatch, room: int | None, count: int, shards: int, lanes_now: int
) -> None:
    monkeypatch.setattr(lanes, "LANES", lanes_now)
    monkeypatch.setattr(lanes, "WORTH_BYTES", 0)
    ids = found(count)
    given = gradients(ids)
    needed, _, orders = find_rows([FIRST, SECOND], CALLS, ids, shards)
    boxes = [] if room is None else [np.zeros(room, np.uint8) for _ in range(shards)]
    sums = RowSums([FIRST, SECOND], boxes)
    for _ in range(2):
        parts = sums.sum(needed, orders, given) or ()
        assert len(parts) == shards
        # Small whole numbers: exact in any order.
        for table, flat in ((0, ids[1].ravel()), (1, np.concatenate([ids[0], ids[2]]))):
            rows = [part[table] for part in parts if table in part]
            mine = {int(i): v for each in rows for i, v in zip(each.ids, each.values, strict=True)}
            counts = np.ones(len(flat), bool)
            if table == 1:
                counts[: len(ids[0])] = ids[0] != 0
            assert sorted(mine) == np.unique(flat[counts]).tolist()
            for one, sum_ in mine.items():
                at = counts & (flat == one)
                np.testing.assert_array_equal(sum_, given[table][at].sum(axis=0))
    if room == 1 << 20:
        inside = [
            np.shares_memory(rows.values, box)
            for part, box in zip(parts, boxes, strict=True)
            for rows in part.values()
        ]
        assert all(inside)
        assert inside


@pytest.mark.parametrize("width", [1, 5])
def test_a_sum_is_the_same_bits_however_many_lanes_there_are(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Float32 from 1e-3 to 1e3, in sums of up to hundreds, some of which are made row by row."""
    random = np.random.default_rng(width)
    ids = (1000 ** random.random(3000)).astype(np.int64)
    table = spec(name="t", width=width)
    needed, _, orders = find_rows([table], [Call(0, IdRule("x"))], [ids], 2)
    given = 10 ** random.uniform(-3, 3, (ids.size, width)).astype(np.float32)
    whole = {one: np.add.accumulate(given[ids == one])[-1] for one in np.unique(ids).tolist()}
    monkeypatch.setattr(lanes, "WORTH_BYTES", 0)
    for lanes_now in (1, 2, 3):
        monkeypatch.setattr(lanes, "LANES", lanes_now)
        parts = RowSums([table]).sum(needed, orders, [given]) or ()
        for part in parts:
            for one, summed in zip(part[0].ids.tolist(), part[0].values, strict=True):
                np.testing.assert_array_equal(summed, whole[one])


def test_whose_gradient_is_not_finite_is_named() -> None:
    ids = found(40)
    ids[0][3] = 0
    needed, _, orders = find_rows([FIRST, SECOND], CALLS, ids, 3)
    given = gradients(ids)
    assert not_finite(needed, orders, given) is None
    # Of the second call of that table, after all of the first.
    given[1][ids[0].size + 5, 2] = np.inf
    assert not_finite(needed, orders, given) == (1, ids[2][5])
    given[0][7, 0] = np.nan
    assert not_finite(needed, orders, given) == (0, ids[1].ravel()[7])
    summed = [np.ones((each.size, 3), np.float32) for each in needed.ids]
    assert not_finite(needed, (), summed) is None
    summed[1][4, 1] = np.nan
    assert not_finite(needed, (), summed) == (1, needed.ids[1][4])
    # An id that counts for nothing has no row.
    given = gradients(ids)
    given[1][3] = np.nan
    assert not_finite(needed, orders, given) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_sum_that_is_not_finite_is_found(bad: float) -> None:
    """Once where it comes first, once where it is added, once where most are; 3e38 overflows."""
    ids = [np.repeat([1, 2, 3], [1, 2, 300]), np.zeros((0, 2), int), np.zeros(0, int)]
    needed, _, orders = find_rows([FIRST, SECOND], CALLS, ids, 1)
    for at in ([0], [2], [1, 2], [200, 300]):
        given = [np.zeros((0, 3), np.float32), np.zeros((303, 5), np.float32)]
        assert RowSums([FIRST, SECOND]).sum(needed, orders, given) is not None
        given[1][at, 4] = bad
        finite = bad == 3e38 and len(at) == 1
        assert (RowSums([FIRST, SECOND]).sum(needed, orders, given) is not None) == finite
