"""Columns grow in place, and take no memory before they are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pserver.tables.memory import Column, scatter


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_rows_stay_and_new_ones_are_zero() -> None:
    column = Column(np.float32, 5)
    for rows in (1, 1000, 300_000):
        column.reserve(rows)
        assert column.capacity >= rows
        column.rows()[rows - 1] = rows
    assert column.rows()[[0, 1, 999, 1000, 299_999], 4].tolist() == [1, 0, 1000, 0, 300_000]
    assert column.rows().ctypes.data % 64 == 0
    assert column.rows().shape == (column.capacity, 5)


def test_untouched_room_is_free() -> None:
    before = resident()
    column = Column(np.float32, 64)
    column.reserve(1 << 24)
    column.rows()[5] = 1
    assert resident() - before < 64 << 20


def test_a_view_that_lives_on_keeps_its_memory() -> None:
    column = Column(np.int32)
    view = column.rows()
    view[0] = 7
    column.reserve(1 << 20)
    column.rows()[0] += 1
    assert (view[0], column.rows()[0]) == (7, 8)


def test_scatter() -> None:
    rows = np.zeros((6, 3), np.float32)
    scatter(rows, np.array([4, 0]), np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    assert rows.sum(axis=1).tolist() == [15, 0, 0, 0, 6, 0]
