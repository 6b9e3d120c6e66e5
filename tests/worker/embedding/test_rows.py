"""Which rows a batch needs, and where its ids find theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import structlog

from psrpc.core.errors import InvalidJob
from psrpc.core.tables import MAX_IDS, TableSpec, shard_of
from worker.embedding.row_sets import RowSets, rows_nbytes
from worker.embedding.rows import Call, IdRule, find_rows


def table(name: str = "t", width: int = 3, vocabulary: int | None = None) -> TableSpec:
    config = {"value": 0.0}
    sgd = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
    return TableSpec(name, width, vocabulary, {"class_name": "constant", "config": config}, sgd)


def ids(*values: Any) -> Any:
    return np.array(values, np.int64)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_each_place_is_that_of_its_id_and_each_shard_has_its_own_ascending(shards: int) -> None:
    generator = np.random.default_rng(shards)
    found = [
        generator.integers(-(2**63), 2**63 - 1, (7, 3)),
        generator.integers(0, 9, 50),
        generator.integers(0, 9, (4, 2)),
        generator.integers(0, 1000, 400),
    ]
    tables = [table("a"), table("b", vocabulary=9), table("unused"), table("c")]
    calls = [Call(0, IdRule("x")), Call(1, IdRule("y")), Call(1, IdRule("z")), Call(3, IdRule("w"))]
    needed, places, orders = find_rows(tables, calls, found, shards)
    for call, given, at in zip(calls, found, places, strict=True):
        assert at.shape == given.shape
        assert at.dtype == np.int32
        np.testing.assert_array_equal(needed.ids[call.table][at], given)
    for index, by in enumerate(orders):
        of_calls = [p.ravel() for c, p in zip(calls, places, strict=True) if c.table == index]
        at = np.concatenate([np.empty(0, np.int32), *of_calls])
        np.testing.assert_array_equal(by.order, np.argsort(at, kind="stable"))
        np.testing.assert_array_equal(at[by.order][by.starts[:-1]], np.arange(by.starts.size - 1))
        assert by.starts[-1] == at.size
    both = np.concatenate([found[1].ravel(), found[2].ravel()])
    assert sorted(needed.ids[1]) == sorted(set(both.tolist()))
    assert needed.ids[2].size == 0
    for shard in range(shards):
        for index, part in needed.on_shard(shard).items():
            mine = needed.ids[index][part]
            assert (np.diff(mine) > 0).all()
            assert (shard_of(mine, shards) == shard).all()


def test_slices_beside_the_shards_have_no_rows() -> None:
    calls = [Call(0, IdRule("x"))]
    needed, _, _ = find_rows([table()], calls, [ids(3, 1, 4, 1, 5)], 2)
    more = needed.with_slices(2)
    assert [more.on_shard(shard) for shard in range(2)] == [needed.on_shard(k) for k in range(2)]
    assert [more.on_shard(shard) for shard in (2, 3)] == [{}, {}]
    assert needed.with_slices(0) is needed


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "edge", [(2**31 - 2, 2**31 - 1), (2**31 - 1, 2**31), (-1, 0), (-(2**63), 2**63 - 1)]
)
def test_ids_of_any_size_are_found_in_the_order_of_the_batch(
    edge: tuple[int, int], shards: int
) -> None:
    given = np.array([*edge, 5, *edge, 0, edge[1]])
    needed, (at,), (by,) = find_rows([table()], [Call(0, IdRule("x"))], [given], shards)
    assert sorted(needed.ids[0].tolist()) == sorted({*edge, 5, 0})
    np.testing.assert_array_equal(needed.ids[0][at], given)
    np.testing.assert_array_equal(by.order, np.argsort(at, kind="stable"))


def test_the_order_by_row_is_that_of_the_batch_within_a_row() -> None:
    tables = [table("a"), table("b", vocabulary=5), table("unused")]
    calls = [Call(1, IdRule("x", "drop")), Call(0, IdRule("y")), Call(1, IdRule("z"))]
    found = [ids([3, 9], [1, 3]), ids(7, -7, 7), ids(1, 1)]
    _, _, (first, second, none) = find_rows(tables, calls, found, 1)
    np.testing.assert_array_equal(first.order, [1, 0, 2])
    np.testing.assert_array_equal(first.starts, [0, 1, 3])
    # Of 3, 9, 1, 3, 1, 1 without the second.
    np.testing.assert_array_equal(second.order, [2, 4, 5, 0, 3])
    np.testing.assert_array_equal(second.starts, [0, 3, 5])
    assert none.order.shape == (0,)
    assert none.starts.tolist() == [0]
    assert {each.order.dtype.name for each in (first, second, none)} == {"int32"}


def test_gradients_are_cut_as_the_ids_are() -> None:
    given = np.arange(40)
    needed, _, _ = find_rows([table()], [Call(0, IdRule("x"))], [given], 3)
    values = needed.ids[0][:, np.newaxis].astype(np.float32) * np.ones(3, np.float32)
    parts = needed.split([values], 3)
    assert sum(part[0].ids.size for part in parts) == 40
    for part in parts:
        np.testing.assert_array_equal(part[0].values[:, 1], part[0].ids)


def test_an_id_outside_of_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(InvalidJob, match=r"layer 'x' was given id 5, which table 'users' has not"):
        find_rows([table("users", vocabulary=5)], [Call(0, IdRule("x"))], [ids(0, 5, -1)], 2)


def test_ids_outside_of_the_vocabulary_are_clipped() -> None:
    rule = IdRule("x", "clip")
    needed, (at,), _ = find_rows([table(vocabulary=5)], [Call(0, rule)], [ids(-7, 2, 9)], 2)
    np.testing.assert_array_equal(needed.ids[0][at], [0, 2, 4])


@pytest.mark.parametrize("padding", [-1, 5, 2])
def test_padding_is_known_before_ids_are_clipped(padding: int) -> None:
    rule = IdRule("x", "clip", padding)
    given = ids(padding, -7, 3, 9)
    needed, (at,), _ = find_rows([table(vocabulary=5)], [Call(0, rule)], [given], 1)
    np.testing.assert_array_equal(needed.ids[0], [0, 3, 4])
    np.testing.assert_array_equal(at, [-1, 0, 1, 2])
    # Nor is an id padding for what it is clipped to.
    rule = IdRule("x", "clip", padding=0)
    needed, (at,), _ = find_rows([table(vocabulary=5)], [Call(0, rule)], [ids(-7, 0)], 1)
    np.testing.assert_array_equal(at, [0, -1])


def test_ids_outside_of_the_vocabulary_and_padding_come_to_no_row() -> None:
    rule = IdRule("x", "drop", padding=0)
    needed, (at,), _ = find_rows([table(vocabulary=5)], [Call(0, rule)], [ids([-7, 2], [0, 4])], 1)
    np.testing.assert_array_equal(needed.ids[0], [2, 4])
    np.testing.assert_array_equal(at, [[-1, 0], [-1, 1]])


def test_padding_need_not_be_in_the_vocabulary() -> None:
    rule = IdRule("x", padding=-1)
    needed, (at,), _ = find_rows([table(vocabulary=5)], [Call(0, rule)], [ids(-1, 3)], 1)
    np.testing.assert_array_equal(at, [-1, 0])
    assert needed.ids[0].tolist() == [3]
    with pytest.raises(InvalidJob, match="id -2"):
        find_rows([table(vocabulary=5)], [Call(0, rule)], [ids(-1, -2)], 1)


def test_a_batch_of_too_many_ids_is_refused() -> None:
    given = np.arange(MAX_IDS + 1)
    with pytest.raises(InvalidJob, match=r"524289 rows of shard 0.*batch_size"):
        find_rows([table()], [Call(0, IdRule("x"))], [given], 1)
    needed, _, _ = find_rows([table()], [Call(0, IdRule("x"))], [given], 2)
    assert needed.ids[0].size == MAX_IDS + 1


def test_rows_take_turns_in_two_areas_and_what_does_not_fit_has_its_own() -> None:
    tables = [table("a"), table("b", width=16)]
    calls = [Call(0, IdRule("x")), Call(1, IdRule("y"))]
    needed, _, _ = find_rows(tables, calls, [np.arange(5), np.arange(0)], 2)
    nbytes = rows_nbytes(tables, needed)
    assert nbytes == 64 + 64
    areas = [np.ones(nbytes // 4 + 32, np.float32).view(np.uint8)[:nbytes] for _ in range(2)]
    sets = RowSets(tables, areas)
    first, second, third = (sets.place(needed) for _ in range(3))
    for received, area in ((first, areas[0]), (second, areas[1]), (third, areas[0])):
        assert [values.shape for values in received.values] == [(5, 3), (1, 16)]
        assert all(np.shares_memory(values, area) for values in received.values)
        # A row for dropped ids, of which nothing can come.
        assert not received.values[1].any()
    more, _, _ = find_rows(tables, calls, [np.arange(25), np.arange(2)], 2)
    with structlog.testing.capture_logs() as logs:
        received = sets.place(more)
        sets.place(more)
        RowSets(tables).place(more)  # those of an evaluation, which are not meant for it
    assert [(line["nbytes"], line["room"]) for line in logs] == [
        (rows_nbytes(tables, more), nbytes)
    ]
    received = sets.place(more)
    assert not np.shares_memory(received.values[0], areas[1])
    assert received.values[0].ctypes.data % 64 == 0
    np.testing.assert_array_equal(received.wanted(1).ids[0], more.ids[0][more.on_shard(1)[0]])
    assert received.wanted(0).into[1].base is not None
