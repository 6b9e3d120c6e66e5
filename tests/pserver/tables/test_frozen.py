"""Frozen tables beside the model test: what they cost, and when what is known ends."""

from __future__ import annotations

import numpy as np

from pserver.tables import frozen as removals
from pserver.tables.table import Table
from tests.pserver.tables.table_cases import gradients, ids_of, spec


def apply(table: Table, *ids: int, version: int) -> None:
    table.apply(gradients(ids, seed=version), 1.0, version - 1, version)


def test_touched_rows_are_saved() -> None:
    table = Table(spec(), 0, 1)
    apply(table, *range(1000), version=1)
    frozen = table.freeze()
    assert frozen.nbytes < 8192
    before = frozen.nbytes
    for version in (2, 3):
        apply(table, *range(500, 600), *range(5000, 5500), version=version)
    row_nbytes = 8 + 4 + 4 + 12 + 4
    assert frozen.nbytes - before == 100 * row_nbytes
    frozen.close()
    frozen.close()
    apply(table, 1, version=4)


def test_a_removed_row_is_read_though_it_came_again() -> None:
    table = Table(spec(max_rows=2, eviction="age"), 0, 1)
    apply(table, 1, 2, version=1)
    frozen = table.freeze()
    before, now = np.empty((3, 3), np.float32), np.empty((3, 3), np.float32)
    table.read(ids_of(1, 2, 3), before)
    for version, i in enumerate((3, 4, 1, 3, 2, 1), 2):
        apply(table, i, version=version)
    frozen.read(ids_of(1, 2, 3), now)
    np.testing.assert_array_equal(now, before)
    assert frozen.present(ids_of(1, 2, 3, 4)).tolist() == [True, True, False, False]
    assert sorted(frozen.block(frozen.since(-1)).ids.tolist()) == [1, 2]


def test_slots_are_used_again_while_a_table_is_frozen() -> None:
    """Of rows that were removed before it was, and after; also by the very rows that had them."""
    table = Table(spec(max_rows=4, eviction="age"), 0, 1)
    for version, i in enumerate((1, 2, 3, 4, 5), 1):
        apply(table, i, version=version)
    assert table.present(ids_of(1, 2, 3, 4, 5)).tolist() == [False, True, True, True, True]
    table.remove(ids_of(3))
    frozen = table.freeze()
    ids = np.arange(1, 9)
    before = np.empty((8, 3), np.float32)
    table.read(ids, before)
    there = table.present(ids)
    now = np.empty_like(before)
    random = np.random.default_rng(1)
    for version, i in enumerate((3, *random.integers(1, 9, 60)), 6):
        apply(table, int(i), version=version)
        frozen.read(ids, now)
        np.testing.assert_array_equal(now, before)
        np.testing.assert_array_equal(frozen.present(ids), there)
        assert sorted(frozen.block(frozen.since(-1)).ids.tolist()) == [2, 4, 5]
    assert table._store.used == 4
    assert len(frozen._saved) == 3


def test_a_table_that_is_forgotten_leaves_the_frozen_one() -> None:
    table = Table(spec(), 0, 1)
    apply(table, 1, 2, version=1)
    frozen = table.freeze()
    table.forget()
    apply(table, 7, version=1)
    assert frozen.block(frozen.since(-1)).ids.tolist() == [1, 2]
    frozen.close()
    assert len(table) == 1


def test_removed_ids_are_known_for_a_while() -> None:
    log = removals.Removals(limit=5)
    assert log.since(0) is not None
    log.begin(11)
    assert log.since(9) is None
    log.add(11, ids_of(5, 3))
    log.add(12, ids_of(4, 5))
    earlier = log.copy()
    log.add(13, ids_of(1, 2))
    assert log.since(10) is None
    found = log.since(11)
    assert found is not None
    assert found.tolist() == [1, 2, 4, 5]
    latest = log.since(12)
    assert latest is not None
    assert latest.tolist() == [1, 2]
    known = earlier.since(10)
    assert known is not None
    assert known.tolist() == [3, 4, 5]


def test_ids_that_came_again_are_not_removed() -> None:
    table = Table(spec(max_rows=2, eviction="age"), 0, 1)
    for version, i in enumerate((1, 2, 3, 1), 1):
        apply(table, i, version=version)
    frozen = table.freeze()
    found = frozen.removed_since(0)
    assert found is not None
    assert found.tolist() == [2]
    assert frozen.removed_since(-1) is None
